"""Defines how the stored pages of one model are cut into units of layers x KV heads.

The units do not depend on who stores them.

A page is stored in parts, one for each unit, and a part's key names its unit (the spec's section 10). An engine under
tensor or pipeline parallelism holds a rectangle of the model; it stores the units that lie inside and loads those that
it touches. Engines of any parallelism thus share a store if they use one grid. Engines of different grids share
nothing, and take no harm: their keys differ. Pure. The grid is counted over the whole model, from layer 0 and head 0
on, never from the part that one rank holds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvparams.keys import Geometry, KVShard

__all__ = ["ShardGrid"]


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """Units of `layer_unit` layers and `head_unit` KV heads; the last one of each row may be smaller."""

    layer_unit: int
    head_unit: int

    def __post_init__(self) -> None:
        for name, value in (("layer_unit", self.layer_unit), ("head_unit", self.head_unit)):
            if value < 1:
                raise ValueError(f"{name} is {value}; a unit has at least one layer and one head")

    @classmethod
    def single_unit(cls, rectangle: KVShard) -> "ShardGrid | None":
        """The grid of which `rectangle` is one unit: what an engine uses that shares with its equals only.

        None if there is none: the rectangle starts inside of a unit of its own size.
        """
        if rectangle.layer_start % rectangle.layers or rectangle.head_start % rectangle.heads:
            return None
        return cls(rectangle.layers, rectangle.heads)

    @classmethod
    def shared(cls, geometry: Geometry, *, tensor: Iterable[int] = (1,), pipeline: Iterable[int] = (1,)) -> "ShardGrid":
        """The coarsest grid that engines of all these parallel sizes can store and load whole units of.

        Args:
            geometry: the whole model's.
            tensor: sizes of tensor parallelism. Above the number of KV heads a head is on several ranks.
            pipeline: sizes of pipeline parallelism with equal stages. Stages of unequal size need `layer_unit=1`, or
                a divisor of all their boundaries.

        Raises:
            ValueError: a size does not divide the heads or layers, nor (tensor) is a multiple of the heads.
        """
        heads = [_share("KV heads", geometry.kv_heads, size) for size in tensor]
        layers: list[int] = []
        for size in pipeline:
            if geometry.layers % size:
                raise ValueError(
                    f"{geometry.layers} layers in {size} pipeline stages are not equal stages: choose a layer_unit "
                    "that divides every stage's first layer, 1 if nothing else does"
                )
            layers.append(geometry.layers // size)
        return cls(math.gcd(*layers), math.gcd(*heads))

    def units_touching(self, rectangle: KVShard, geometry: Geometry) -> tuple[KVShard, ...]:
        """The units that `rectangle` touches, by layers and then by heads."""
        units: list[KVShard] = []
        for layer in range(rectangle.layer_start - rectangle.layer_start % self.layer_unit, rectangle.layer_end):
            if layer % self.layer_unit:
                continue
            layer_end = min(layer + self.layer_unit, geometry.layers)
            for head in range(rectangle.head_start - rectangle.head_start % self.head_unit, rectangle.head_end):
                if head % self.head_unit == 0:
                    units.append(KVShard(layer, layer_end, head, min(head + self.head_unit, geometry.kv_heads)))
        return tuple(units)


def _share(what: str, count: int, size: int) -> int:
    """Returns how many of `count` heads one of `size` ranks holds."""
    if size >= 1 and count % size == 0:
        return count // size
    if size >= 1 and size % count == 0:
        return 1
    raise ValueError(f"{count} {what} cannot be divided over {size} ranks")
