"""Names the mutants of `mutants.py` that no seed notices, each with the reason.

Either they change nothing that anybody could see, or it is a limit of the simulation. Where a test outside of it fails
with the mutant, the reason names that test.
"""

# ruff: noqa: E501  the keys of `EQUIVALENT` are statements, which stay whole

__all__ = ["EQUIVALENT"]

_CACHE = "only bounds a cache: what was forgotten is made again"
_FAULT = "only where the proxy itself has a fault; nothing that engines and clients do leads there"
_SERVER = "uvicorn ends the task as soon as the answer is complete or the client has left; for servers that do not"
_TURN_LATER = "the end of the connection says the same a turn later"
_ABORTED = "nothing is received behind an abort, and the exchange has let go of its sink"
_LOST = "nothing follows the loss of a connection"
_TRIAL = "the leg has been released, so its trial ends a turn later"
_LIMIT = "a limit of the simulation, not an equivalence: "
_MEETING = "no connector whose engines meet leaves anything to be dropped by a prefill that broke off"
_UNLIMITED = "a limit of the simulation: no request has a time-out of its own"
_FREED = "a limit of the simulation: it is memory that only the collector frees; tests/system/proxy/execution/test_released.py holds it"
_SOONER = "no release: a stream is looked into sooner or more often without it, and what is found is the same"
_START = "only where the start is cancelled, or nobody waits for it any more"
EQUIVALENT: dict[str, str] = {
    "kvparams.routing.managers.prefill_then_decode:PrefillThenDecode.legs: state.release_prefill()": f"{_LIMIT}nobody asks "
    "for several answers; tests/unit/kvparams/routing/test_prefill_then_decode.py holds it",
    "kvparams.routing.managers.concurrent_attempt:attempt_concurrently: release_abandoned(context, speech, prefill, transfer, attempt)": (
        _MEETING
    ),
    "kvparams.routing.managers.prefill_then_decode:PrefillThenDecode.legs: state.release_decode()": (
        f"{_LIMIT}nobody asks for several answers, as above"
    ),
    "kvparams.routing.managers.prefill_then_decode:PrefillThenDecode._choose: state.release_decode()": (
        f"{_LIMIT}nobody waits in a group that goes; tests/unit/kvparams/routing/test_unpaired_instances.py holds it"
    ),
    "kvparams.routing.managers.concurrent_attempt:attempt_concurrently: state.release_prefill()": f"{_LIMIT}as the last",
    "kvparams.routing.managers.attempt_state:AttemptState.release_prefill: self.context.release_instance(self.prefill)": (
        f"{_LIMIT}as the last"
    ),
    "kvparams.routing.managers.attempt_state:AttemptState.release_prefill: self.prefill = None": f"{_LIMIT}as the last",
    "kvparams.routing.managers.concurrent_attempt:attempt_concurrently: state.prefill = None": f"{_LIMIT}engines meet in one "
    "mode only, which chooses a prefill instance for each attempt; tests/unit/kvparams/routing/test_concurrent_legs.py "
    "holds it",
    "kvparams.routing.managers.concurrent_attempt:attempt_concurrently: state.decode = None": f"{_LIMIT}engines meet in one "
    "mode only, which never holds a decode instance; tests/unit/kvparams/routing/test_concurrent_legs.py holds it",
    "kvparams.routing.managers.prefill_then_decode:PrefillThenDecode._prefill: state.release_decode()": f"{_LIMIT}nobody minds "
    "that a request fails which another group could answer; tests/system/modes/test_group_failover.py holds it",
    "kvparams.routing.managers.concurrent_attempt:attempt_concurrently: release_abandoned(context, speech, prefill, transfer, attempt) #1": (
        _MEETING
    ),
    "leg_runner:LegRunner.start: context.abandon_kv(gone=False)": f"{_LIMIT}only with a broker prefill may break "
    "off, and decode does it all",
    "leg_settlement:LegSettlement._settle_failure: context.abandon_kv(gone=False)": f"{_LIMIT}only where its client leaves "
    "during the next prefill, two seeds of 100,000; tests/system/proxy/telemetry/test_metrics.py notices it",
    "leg_runner:LegRunner._release_decode: running.abort(wrong)": "what is wrong with an event is found when it is held",
    "kvparams.routing.managers.leg_documents:LegDocuments.leg_changes: self._templates.clear()": _CACHE,
    "candidates:Candidates._find: self._candidates.clear()": _CACHE,
    "candidates:Candidates.forget_candidates: self._candidates.clear()": "no release: it lets a trial be the only one",
    "dispatcher:Dispatcher.released: self._room.record_leg_end()": "it only measures, for Retry-After",
    "kvparams.routing.fair_queue:FairQueue._head: del self._lanes[lane]": "an empty heap is like none, and dropped in time",
    "kvparams.routing.fair_queue:FairQueue._compact: del flow.lanes[lane]": f"{_LIMIT}fewer than 64 give up",
    "lifespan:_open_telemetry: stack.push_async_callback(spans.close)": f"{_LIMIT}there are no traces",
    "lifespan:_open_token_service: stack.callback(tokens.close)": f"{_LIMIT}there is no tokenizer",
    "lifespan_helpers:open_event_consumer: stack.callback(events.close)": f"{_LIMIT}no engine tells of its cache",
    "lifespan_helpers:open_decode_picker: stack.push_async_callback(picker.close)": f"{_LIMIT}no picker is asked",
    "lifespan_helpers:reload_on_change: task.cancel()": f"{_LIMIT}there are no files of keys",
    "lifespan_helpers:run_startup_check: task.cancel()": f"{_LIMIT}engines are not checked at the start",
    "lifespan:_open_parts: stack.callback(LoopLag(loop, metrics.loop_lag).close)": "it is not made at all without it",
    "lifespan:_open_parts: stack.callback(trimmer.close)": f"{_LIMIT}bodies are too small to be trimmed",
    "http_server:_until_signal: server.stop()": f"{_LIMIT}there are no signals; tests/system/proxy/config/test_shutdown.py holds it",
    "http_server:_until_signal: task.cancel()": f"{_LIMIT}there are no signals, and no start that fails",
    "http_server:_until_signal: notifier.close()": f"{_LIMIT}no service manager is told; "
    "tests/unit/proxy/test_service_notifier.py holds it",
    "http_server:ProxyServer.run: listener.close()": "the listener is closed already, unless the start fails",
    "http_server:ProxyServer._serve: accepting.close()": "it is closed already, unless the server itself is cancelled",
    "http_server:ProxyServer._drain: connections.close_idle()": f"{_LIMIT}no connection is idle for more than a moment; "
    "tests/system/proxy/config/test_shutdown.py holds it",
    "http_server:ProxyServer.run: connections.fail_incomplete_requests()": f"{_LIMIT}a body is awaited as the proxy stops in 4 seeds of 100,000; "
    "tests/system/proxy/config/test_shutdown.py holds it",
    "connections:ClientConnections.fail_incomplete_requests: connection.fail_incomplete_request()": f"{_LIMIT}as the last",
    "exchange:UpstreamExchange.half_close: self._retry = False": f"{_LIMIT}it takes a kept connection that is closed just "
    "when a client leaves; tests/system/proxy/upstream/test_connection_pool.py holds it",
    "breakers:Breakers.restarted: self.forget(member)": "a timer that finds nothing to do",
    "direct_path:DirectDownstream.end_body: self.drop()": _FAULT,
    "direct_path:DirectDownstream.refuse: self._body.release()": "its end releases it too; a little later",
    "asgi_exchange:ASGIExchange.refuse: self._transport.abort()": f"{_LIMIT}nobody sends a body that goes wrong behind the "
    "first byte of its answer",
    "asgi_exchange:ASGIExchange.refuse: self.end()": "whoever refuses a request ends its connection next, unless the app has a "
    "fault",
    "asgi_exchange:ASGIExchange.client_slow: self._flow.clear()": f"{_LIMIT}nobody counts what waits in a transport; "
    "tests/system/proxy/server/test_leaving.py holds it",
    "asgi_exchange:ASGIExchange.serve: self._transport.abort()": _FAULT,
    "body:BodyBudget.release: self._freed(size)": f"{_LIMIT}bodies are too small to be trimmed; "
    "tests/system/proxy/requests/test_client_memory.py holds it",
    "connections:ClientConnections.close_idle: connection.shed()": f"{_LIMIT}no connection is idle for more than a moment; "
    "tests/system/proxy/config/test_shutdown.py holds it",
    "connections:ClientConnections.close: connection.close()": "whatever is left is aborted two seconds later",
    "connections:ClientConnections._sweep: connection.abort()": f"{_LIMIT}its sockets do not say how TCP stands; "
    "tests/system/proxy/server/test_pipelining.py holds it",
    "pipelined_input:PipelinedInput._account: self._kept_bytes -= more": f"{_LIMIT}no budget is used up; "
    "tests/system/proxy/server/test_pipelining.py holds it",
    "pipelined_input:PipelinedInput.resume_reading: self.transport.resume_reading()": f"{_LIMIT}nobody sends so much ahead; "
    "tests/system/proxy/server/test_leaving.py holds it",
    "asgi_exchange:ASGIExchange.receive: self.owner.resume_reading()": f"{_LIMIT}no body is larger than what is kept of it",
    "pipelined_input:PipelinedInput._go_on: self.resume_reading()": f"{_LIMIT}nobody sends so much ahead, as above",
    "http_protocol:HTTPProtocol.response_complete: self.resume_reading()": f"{_LIMIT}as the last",
    "http_protocol:HTTPProtocol._end: self.resume_reading()": f"{_LIMIT}as the last",
    "connections:ClientConnections._refuse: del self._refused[oldest]": f"{_LIMIT}few are refused at a time; "
    "tests/system/proxy/server/test_client_connections.py holds it",
    "connections:ClientConnections._refuse: oldest.abort()": f"{_LIMIT}as the last",
    "connections:ClientConnections._make_room: self.remove(connection)": f"{_LIMIT}as above, of idle ones; "
    "tests/system/proxy/server/test_client_connections.py holds it",
    "connections:ClientConnections._make_room: connection.shed()": f"{_LIMIT}as the last",
    "http_protocol:HTTPProtocol.shed: self.transport.close()": f"{_LIMIT}as the last",
    "http_protocol:HTTPProtocol._not_served: self._end(linger=True)": f"{_LIMIT}no client sends chunks; "
    "tests/system/proxy/server/test_pipelining.py holds it",
    "http_protocol:HTTPProtocol._fail: self._end(linger=True)": "the end of the refusal has ended the connection already",
    "connections:ClientConnections.close: task.cancel()": "its connection is aborted next, which ends it",
    "http_protocol:HTTPProtocol.close: self.transport.close()": "whatever is left is aborted two seconds later",
    "direct_path:DirectDownstream.watch: self.client_gone()": _TURN_LATER,
    "direct_path:DirectDownstream.drop: self.client_gone()": _TURN_LATER,
    "downstream:ASGIDownstream.watch: watcher.client_gone()": "it is made and watched in one turn",
    "downstream:ASGIDownstream.close: self._writer.cancel()": _SERVER,
    "downstream:ASGIDownstream.close: self._reader.cancel()": _SERVER,
    "request_handler:_LongBodyRead.client_gone: work.cancel()": f"{_LIMIT}bodies are too small to be read in steps; "
    "tests/system/proxy/requests/test_long_bodies.py holds it",
    "request_handler:_LongBodyRead._failed: self._downstream.drop()": _FAULT,
    "asgi_request_handler:ASGIRequestHandler._answer: downstream.close()": _SERVER,
    "asgi_request_handler:ASGIRequestHandler._answer: downstream.drop()": "only where the server cancels its tasks",
    "metrics:Metrics.retain_instances: del self._legs_of[id]": "only bounds the memory for names of instances that have left",
    "connection_pool:UpstreamConnectionPool._connect: self.put_back(connection)": "whoever gives up cancels the task",
    "downstream:ASGIDownstream.drop: self._writer.cancel()": "the timer of the connection ends it a minute later",
    "probes:Prober.__aenter__: self._close()": _START,
    "probes:_MemberProbe.end: self._first.cancel()": _START,
    "probes:_MemberProbe._ask: self._first.cancel()": _START,
    "probes:Prober._close: self._probes.clear()": "the prober itself is let go",
    "deadlines:Deadlines._sweep: self.stop(what)": "whatever expires ends, and stops it",
    "slow_start:SlowStart.startup_complete: self._since.clear()": "those who are there at the start are slow for a moment",
    "breakers:Breakers.failed: member.trial = None": _TRIAL,
    "breakers:Breakers.trial_answered: member.trial = None": "the next trial takes its place, and the end of this leg finds "
    "nothing to do",
    "fleet:Fleet.record_failure: self._blame.forget(instance)": f"{_LIMIT}nobody minds that a pair is avoided for longer; "
    "tests/system/proxy/test_failure_attribution.py holds it",
    "pair_failures:PairFailures._record: del self._records[next(iter(self._records))]": _CACHE,
    "pair_failures:PairFailures._record: del records[next(iter(records))]": _CACHE,
    "pair_failures:PairFailures.record_failure: record.trial = False": f"{_LIMIT}as the last; tests/unit/proxy/fleet/test_pair_failures.py holds it",
    "breakers:Breakers.trial_answered: member.breaker.end_trial()": f"{_LIMIT}seen in one of 6,000 seeds",
    "response_privacy:Allowance.spend: self._left -= units": f"{_LIMIT}no read has so many events; "
    "tests/unit/proxy/execution/test_event_allowance.py holds it",
    "engine_addresses:EngineAddresses._changed: self._pattern = None": f"{_LIMIT}whoever comes was there before, and is hidden still",
    "exchange:UpstreamExchange.discard: self._connecting = None": _FREED,
    "connection_pool:UpstreamConnectionPool._connect: del exchange": _FREED,
    "exchange:UpstreamExchange.finish: self._connection = None": "it is over, or begins anew because that is lost",
    "exchange:UpstreamExchange.finish: self._retry = False": "a new connection is never one that waited",
    "exchange:UpstreamExchange.resume: self._paused = False": f"{_LIMIT}no client is slow before there is a connection",
    "connection:UpstreamConnection.begin: self._keep_alive = False": "it is said anew by each answer that is complete",
    "connection:UpstreamConnection.close: self._exchange = None": _ABORTED,
    "connection:UpstreamConnection.close: self._sink = None": _ABORTED,
    "connection:UpstreamConnection.connection_lost: self._exchange = None": _LOST,
    "connection:UpstreamConnection.connection_lost: self._sink = None": _LOST,
    "connection:UpstreamConnection._go_on: self._later = b''": f"{_LIMIT}no read brings more than is taken in one turn; "
    "tests/system/proxy/execution/test_long_answers.py holds it",
    "connection:UpstreamConnection._go_on: self.transport.resume_reading()": f"{_LIMIT}as the last",
    "connection:UpstreamConnection.connection_lost: del self._parser": f"{_LIMIT}what only the collector frees is not looked "
    "for; tests/system/proxy/execution/test_released.py holds it",
    "connection:UpstreamConnection._end: self._exchange = None": "one that is over hears no more, until the next is there",
    "connection:UpstreamConnection._end: self._sink = None": "what an engine says unasked closes its connection",
    "connection:UpstreamConnection._fail: self._exchange = None": _ABORTED,
    "connection:UpstreamConnection._fail: self._sink = None": _ABORTED,
    "executor:Execution.refused: self._resources.deadlines.stop(self)": f"{_LIMIT}nobody waits then with useless KV; "
    "tests/system/modes/test_group_failover.py holds it",
    "executor:Execution.refused: self._waiting = None": "whoever does not wait may give up again",
    "running_leg:RunningLeg.end: del self._on_answer": _FREED,
    "running_leg:RunningLeg.end: self.relay = None": _FREED,
    "running_leg:RunningLeg.discard: self.exchange = None": _FREED,
    "executor:Execution._finish: self._context.record_answer(self._route)": f"{_LIMIT}it says what decode engines may have "
    "cached; tests/system/modes/test_real_engines.py holds it",
    "kvparams.routing.managers.conditional:Conditional._near: context.release_instance(instance)": f"{_LIMIT}nobody's cache is "
    "known; tests/system/modes/test_choice.py holds it",
    "executor:Execution.resume_plan: failure.__traceback__ = None": f"{_LIMIT}it is memory alone; tests/system/proxy/execution/test_released.py "
    "holds it",
    "running_leg:RunningLeg._cancel_parse: self._parse.cancel()": "it saves work: nobody looks at what is read then",
    "running_leg:RunningLeg._cancel_parse: self._parse = None": _FREED,
    "executor:Execution.on_request_timeout: self._downstream.drop()": _UNLIMITED,
    "executor:Execution._finish: resources.deadlines.stop(self._deadline)": _UNLIMITED,
    "executor:Execution._finish: self._deadline = None": _UNLIMITED,
    "running_leg:RunningLeg.end: self.exchange = None": _FREED,
    "running_leg:RunningLeg.discard: self.relay = None": _FREED,
    "leg_runner:LegRunner.stream_ended: running.relay = None": "its exchange is over, and the end of the leg drops the relay",
    "leg_runner:LegRunner.close: self._running = None": _FREED,
    "leg_runner:LegRunner.close: del self._owner": _FREED,
    "executor:Execution.expire: self._waiting = None": f"{_LIMIT}a later time-out has wrong words; no leak",
    "stream_continuation:StreamRecorder._read: self._unread_bytes = 0": _SOONER,
    "stream_continuation:StreamRecorder._read: self._unread_events = 0": _SOONER,
    "stream_continuation:StreamRecorder._read_oldest: self._unread_bytes -= len(kept)": _SOONER,
    "stream_continuation:StreamRecorder._read_oldest: self._unread_events -= events": _SOONER,
    "stream_continuation:StreamRecorder.undo_last: self._unread_bytes -= len(kept)": _SOONER,
    "stream_continuation:StreamRecorder.undo_last: self._unread_events -= number": _SOONER,
    "stream_continuation:StreamRecorder.undo_last: kept, number = self._unread.pop()": f"{_LIMIT}no event that is recorded is "
    "found wrong as it is corrected; tests/unit/proxy/execution/test_stream_recorder.py holds it",
    "stream_continuation:StreamRecorder.undo_last: del self._answer[answered:]": f"{_LIMIT}no stream breaks twice, once by an event that "
    "is garbled behind good ones; tests/unit/proxy/execution/test_stream_recorder.py holds it",
    "stream_continuation:StreamRecorder.mark_resumed: self._unsaid.clear()": f"{_LIMIT}no stream breaks twice, once behind half a letter",
    "probes:_MemberProbe._placed: self._exchange = None": f"{_LIMIT}engines have no bootstrap servers beside them",
    "probes:_MemberProbe.end: self._bootstrap.close()": f"{_LIMIT}engines have no bootstrap servers beside them",
    "probes:_MemberProbe._over: self._apart_s = 0.0": f"{_LIMIT}nobody minds that probes come later than they should; "
    "tests/system/proxy/upstream/test_probe_times.py holds it",
    "probes:_MemberProbe._wait: self._apart_share = 0.0": f"{_LIMIT}as the last",
    "probes:_MemberProbe.end: self._reading.cancel()": f"{_LIMIT}no engine lists so many models that they are read in steps; "
    "tests/system/proxy/upstream/test_probe_times.py holds it",
    "probes:_MemberProbe._read: self._reading = None": "work that is over holds nothing, and to cancel it does nothing",
    "plan_context:PlanContext.hold_lease: self.kv_claimed = False": f"{_LIMIT}no client leaves just when KV is computed anew; "
    "tests/system/proxy/server/test_leaving.py holds it",
    "stream_relay:StreamRelay._send: self._held.clear()": "nothing is held or looked for in it once the stream has begun",
    "kv_releaser:KVReleaser._tell: self._settled.clear()": f"{_LIMIT}a release that is cut off counts as orphaned; "
    "tests/system/proxy/config/test_shutdown.py holds it",
    "kv_releaser:_RunningRelease.ended: self.exchange = None": "the release itself is let go in the same turn",
    "slow_start:SlowStart.close: self._timer = None": "it is closed once, and begins nothing afterwards",
}
"""Mutants that change nothing one could see, and why; or what the simulation cannot see, and why not."""
