"""Simulates engines as the proxy meets them: HTTP by hand, KV that is held for a transfer, and their faults.

An engine with a `nixl` connector holds the KV of a prompt until a decode leg fetches it, is aborted before, or asks for
it with one token. An engine with a store saves pages. Engines only know what came over the wire, so an omission of the
proxy shows here.
"""

import json
from itertools import count
from typing import TYPE_CHECKING, Any

from kvparams.instances import Role
from tests.system.simulation.answers import (
    ANSWERING,
    CONNECTING,
    PREFILLED,
    RECEIVED,
    SECRET,
    STREAMING,
    TURNING,
    Do,
    Steps,
    answering,
    framed,
    json_answer,
    prompt_ids,
    stream_events,
    whole_answer,
)
from tests.system.simulation.language import answer_ids
from tests.system.simulation.legs import Held, Leg, Link
from tests.system.simulation.network import Socket

if TYPE_CHECKING:
    from tests.system.simulation.world import World

__all__ = ["Engine"]


class Engine:
    """One engine, through all its restarts: a `network.Server`."""

    def __init__(self, world: "World", name: str, role: Role, port: int) -> None:
        self.world = world
        self.name = name
        self.role = role
        self.port = port
        self.host = f"{SECRET}-{name}"
        self.boot = 1
        self.up_at = 0.0
        self.thaws = 0.0
        self.well_at = 0.0
        """Until then it answers no probe as it should."""
        self.links: dict[Link, None] = {}
        self.legs: dict[Leg, None] = {}
        self.held: dict[str, Held] = {}
        self.dropped: set[str] = set()
        """Transfers that were released."""
        self._numbers = count(1)

    # its fate

    def crash(self, for_s: float) -> None:
        """Everything is lost; it is back in `for_s` seconds."""
        world = self.world
        world.note(self.name, "crashes")
        self.boot += 1
        self.up_at = world.now + for_s
        self.thaws = 0.0
        for held in self.held.values():
            if held.state == "held":
                held.state = "lost"
        self.held.clear()
        for leg in list(self.legs):
            leg.finish("crashed")
        for link in list(self.links):
            link.hang_up(reset=True)

    def freeze(self, for_s: float) -> None:
        """It does nothing for so long, its kernel goes on."""
        self.world.note(self.name, f"freezes for {for_s} s")
        self.thaws = max(self.thaws, self.world.now + for_s)

    # as a `Server`

    def connecting(self) -> tuple[float, OSError | None] | None:
        """See `Server.connecting`."""
        if self.world.now < self.up_at:
            return 0.0, ConnectionRefusedError(111, "Connection refused")
        fault = self.world.fault(self.name, "connecting", CONNECTING)
        if fault == "refuse":
            return self.world.delay(), ConnectionRefusedError(111, "Connection refused")
        if fault == "reset":
            return self.world.delay(), ConnectionResetError(104, "Connection reset by peer")
        if fault == "stall":
            return None
        return (0.3 if fault == "slow" else self.world.delay()), None

    def accept(self, socket: Socket) -> Link:
        """See `Server.accept`."""
        link = Link(self, socket)
        self.links[link] = None
        if self.world.now < self.up_at:  # it has crashed meanwhile
            self.world.loop.call_soon(lambda: link.hang_up(reset=True))
        elif (fault := self.world.fault(self.name, "accepting", (None,) * 3 + ("reset", "end", "greets"))) is not None:
            if fault == "greets":
                self.world.loop.call_soon(socket.arrive, b"220 hello\r\n")
            else:
                self.world.loop.call_soon(lambda: link.hang_up(reset=fault == "reset"))
        return link

    # requests

    def serve(self, link: Link, line: str, headers: dict[str, str], raw: bytes) -> None:
        """One has come."""
        world = self.world
        request = headers.get("x-request-id", "")
        if line.startswith("GET /metrics "):  # it has none
            self._begin(Leg(link, "reading", "", {}, request), self._reading())
            return
        if line.startswith("GET "):
            self._begin(Leg(link, "probe", "", {}, request), self._probe())
            return
        path = line.split(" ")[1]
        body: dict[str, Any] = json.loads(raw)
        params: dict[str, Any] = body.get("kv_transfer_params") or {}
        document: dict[str, Any] = params.get("kvparams") or {}
        if path == "/v1/kvparams":
            leg = Leg(link, "drop", "", body, request)
            self._begin(leg, self._drop(leg, document))
            return
        ids = prompt_ids(body, path)
        prompt = bytes(one for one in ids if one < 256).decode()
        phase = document.get("phase")
        alone = "kv_transfer_params" not in body
        kind = "decode" if alone or phase == "decode" else "prefill" if phase == "prefill" else "release"
        able = world.scenario.alone if alone else {Role.PREFILL if kind == "prefill" else Role.DECODE}
        if self.role not in able:
            world.wrong(f"{self.name} is sent a {kind} leg of {prompt}")
        leg = Leg(link, kind, prompt, body, request)
        leg.raw = raw
        world.leg_begun(leg, document.get("transfer"))
        if kind == "prefill":
            steps = self._prefill(leg, ids, document)
        else:
            if not alone:
                self._claim(leg, params)
            steps = self._decode(leg, ids, alone=alone)
        self._begin(leg, steps)

    def _begin(self, leg: Leg, steps: Steps) -> None:
        leg.link.leg = leg
        self.legs[leg] = None
        self.world.note(self.name, f"{leg.kind} of {leg.prompt} on connection {leg.link.number}")
        leg.steps = self._received(leg, steps)
        leg.go()

    def _received(self, leg: Leg, steps: Steps) -> Steps:
        """What can go wrong before anything is done."""
        world = self.world
        world.touch(leg, "received")
        fault = world.fault(self.name, f"receiving {leg.kind}", RECEIVED)
        if fault is None and leg.kind == "decode":
            fault = world.turned_away(self.name, TURNING)
        if fault is None:
            yield from steps
        elif fault in ("reset", "end", "stall", "crash"):
            yield Do(fault)
        elif fault == "late":
            yield 0.3
            yield from steps
        elif fault == "freeze":
            self.freeze(0.6)
            yield from steps
        elif fault == "garbage":
            yield b"\x16\x03\x01 not HTTP\r\n\r\n"
            yield Do.STALL
        elif fault == "busy":
            yield world.random.choice((0.05, 0.3, 2.0))
            yield from steps
        elif fault == "no json" and leg.kind in ("prefill", "decode", "probe"):
            yield json_answer(200, b"<html>busy</html>")
        else:
            message = {"error": {"message": f"no {self.host if fault[0] == '5' else 'way'}", "type": "x", "code": None}}
            yield json_answer(int(fault) if fault != "no json" else 503, json.dumps(message).encode())
            if fault[0] == "4" and leg.held is not None and not leg.deaf:
                leg.held.claims -= 1  # it was refused before it was scheduled: nothing was fetched, nor will be
                leg.held = None

    def _reading(self) -> Steps:
        yield 0.001
        yield json_answer(404, b"{}")

    def _probe(self) -> Steps:
        yield 0.001
        if self.world.now < self.well_at:
            yield json_answer(503, b"{}")
            return
        yield from answering(self, [json_answer(200, b'{"object":"list","data":[{"id":"sim"}]}')], ANSWERING)

    def _prefill(self, leg: Leg, ids: list[int], document: dict[str, Any]) -> Steps:
        world = self.world
        scenario = world.scenario
        body = leg.body
        if body.get("max_tokens") != 1 or body.get("stream") is not False:
            world.wrong(f"{self.name} is to prefill more than one token of {leg.prompt}")
        yield world.pause()
        key = f"{self.name}-{self.boot}-{next(self._numbers)}"
        leg.held = held = Held(key, document["transfer"]["id"], leg.prompt, ids)
        self.held[key] = held
        if held.transfer in self.dropped:  # the release has overtaken the leg that it is about
            held.state = "released"
        world.held.append(held)
        world.touch(leg, "computed")
        result = {**document, "phase": "prefill_result"}
        result.pop("prefix", None)
        result.pop("isolation", None)
        if scenario.lease_ms is not None:
            result["lease"] = {"ttl_ms": scenario.lease_ms}
        params: Any = {}
        if scenario.dialect == "nixl":
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"{self.name}-{self.boot}",
                "remote_block_ids": [[1, 2]],
                "remote_host": self.host,
                "remote_port": self.port,
                "remote_request_id": key,
            }
            if scenario.lease_ms is not None:
                params["kvparams"] = result
        else:
            result["load_keys"] = [key]
            params = {"kvparams": result}
        fault = world.fault(self.name, f"prefilling {leg.prompt}", PREFILLED)
        if fault == "null params":
            params = None
        elif fault == "bad params":
            params = {**params, "kvparams": {"version": "9"}}
        answer = whole_answer(body, ids, answer_ids(ids, 1), self._cached(ids))
        if fault != "no params":
            answer["kv_transfer_params"] = params
        raw = json.dumps(answer).encode() if fault != "no json" else b'{"choices": ['
        yield world.pause()
        world.touch(leg, "answer")
        yield from answering(self, framed(world.random, self.name, "application/json", [raw]), ANSWERING)
        held.answered = fault is None and not leg.deaf
        world.touch(leg, "end")

    def _cached(self, ids: list[int]) -> int | None:
        """What whoever computes a prompt says of its cache."""
        return len(ids) // 4 if self.world.scenario.reports_cached else None

    def _claim(self, leg: Leg, params: dict[str, Any]) -> None:
        """The leg names KV: from now on nobody else may."""
        world = self.world
        if world.scenario.dialect != "nixl":
            leg.held = world.find(next(iter(params["kvparams"].get("load_keys", ())), None))
        else:
            leg.held = world.find(params.get("remote_request_id"))
            if leg.held is None:
                world.wrong(f"{self.name} is sent a {leg.kind} leg of {leg.prompt} that names no KV")
        held = leg.held
        if held is None:
            return
        held.claims += 1
        held.releases += leg.kind == "release"
        if held.claims > 1 and world.scenario.dialect == "nixl":
            world.wrong(f"{self.name} is sent {held.key} of {leg.prompt} in a {leg.kind} leg: it was claimed before")
        if held.prompt != leg.prompt:
            world.wrong(f"{self.name} is sent KV of {held.prompt} for {leg.prompt}")

    def _decode(self, leg: Leg, ids: list[int], *, alone: bool) -> Steps:
        world = self.world
        body = leg.body
        found = leg.held
        if world.scenario.doubts and world.on_trial(self):
            self.well_at = world.now + 0.3
            yield 0.8
        yield world.pause()
        loaded = found is not None and found.state == "held"
        if loaded and found is not None:
            if world.scenario.dialect == "nixl":
                found.state = "released" if leg.kind == "release" else "fetched"
            ids = found.ids if len(found.ids) >= len(ids) else ids
        world.touch(leg, "fetched")
        if leg.kind == "decode" and world.turned_away(self.name, (None, None, "503")) is not None:
            yield json_answer(503, b'{"error":{"message":"it is too much","type":"x","code":503}}')
            return
        if not (loaded or alone) and world.scenario.dialect == "nixl" and world.scenario.fails_without_kv:
            world.troubles += 1
            yield json_answer(500, b'{"error":{"message":"kv load failed","type":"x","code":500}}')
            return
        cached = self._cached(ids) if alone else len(ids) - 1
        answer = answer_ids(ids, int(body.get("max_completion_tokens") or body["max_tokens"]))
        yield world.pause()
        world.touch(leg, "answer")
        if not body.get("stream"):
            document = whole_answer(body, ids, answer, cached)
            document["kv_transfer_params"] = {"remote_host": SECRET}
            document["remote_host"] = "here"
            document["served_by"] = f"http://{self.host}:{self.port}"
            pieces = framed(world.random, self.name, "application/json", [json.dumps(document).encode()])
            yield from answering(self, pieces, ANSWERING)
        else:
            pieces = framed(world.random, self.name, "text/event-stream", stream_events(body, ids, answer, cached))
            yield from answering(self, pieces, STREAMING, leg)
        world.touch(leg, "end")

    def _drop(self, leg: Leg, document: dict[str, Any]) -> Steps:
        yield 0.001
        self.dropped.add(document["transfer"]["id"])
        for held in self.held.values():
            if held.transfer == document["transfer"]["id"] and held.state == "held":
                held.state = "released"
                leg.held = held
        yield from answering(self, [json_answer(200, b"{}")], ANSWERING)
