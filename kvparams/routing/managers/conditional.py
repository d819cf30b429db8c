"""Remote prefill only where it is worth it: prompts that are short, or cached with decode, stay there.

An engine does another role's work only if the operator has said so.
"""

from collections.abc import Sequence

from kvparams.instances import RequestFacts, Role
from kvparams.routing.managers.aggregated import Aggregated
from kvparams.routing.managers.manager_options import ManagerOptions
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import AcquireInstance, ExecutionContext, Plan, as_instance
from kvparams.signing.signer import Signer

__all__ = ["Conditional"]

_REMOTE_TOKENS = 512
"""Of a prompt that decode would compute in the time that a hand-over costs; to be measured for the engines at hand."""


class Conditional:
    """A `Conditional` manager uses remote prefill only for prompts with many uncached tokens.

    Options: `remote_tokens`, from how many uncached tokens on a prompt is sent to a prefill engine; `fallback`: where a
    role is missing, engines that are there do both, aggregated ones first.

    What is cached is known where the policy looks at caches (`cache_aware`); elsewhere nothing is taken to be.
    """

    def __init__(self, signer: Signer | None = None, options: ManagerOptions | None = None) -> None:
        given = options or ManagerOptions()
        self._least = given.read_int("remote_tokens", _REMOTE_TOKENS)
        self._fallback = given.read_bool("fallback", False)
        self.roles = () if self._fallback else (Role.PREFILL, Role.DECODE)
        self._split = PrefillThenDecode(signer)
        self._alone = {role: Aggregated(role=role) for role in Role}

    def legs(self, request: RequestFacts, context: ExecutionContext) -> Plan:
        """See `DisaggregatedRequestManager.legs`."""
        if self._fallback and not (context.has_candidates(Role.PREFILL) and context.has_candidates(Role.DECODE)):
            able = next(
                (role for role in (Role.AGGREGATED, Role.DECODE, Role.PREFILL) if context.has_candidates(role)), None
            )
            return self._alone[able or Role.DECODE].legs(request, context)
        cached = context.cached_tokens(Role.DECODE)
        if request.prompt_tokens < self._least:
            return self._alone[Role.DECODE].legs(request, context)
        near = [id for id, tokens in cached.items() if request.prompt_tokens - tokens < self._least]
        return self._near(request, context, near) if near else self._split.legs(request, context)

    def _near(self, request: RequestFacts, context: ExecutionContext, near: Sequence[str]) -> Plan:
        """Decode alone, where the rest of the prompt is; any other engine would compute all of it."""
        instance = as_instance((yield AcquireInstance(Role.DECODE, prefer=near)))
        if instance.id in near:
            yield from self._alone[Role.DECODE].legs(request, context, chosen=instance)
        else:
            context.release_instance(instance)
            yield from self._split.legs(request, context)
