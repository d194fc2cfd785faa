"""The state of every request at every step, folded from a run's records.

Figures, metrics, the cost model and the simulator read this fold. The player has the same fold in
JavaScript (show/player/fold.js), which is tested against this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mini_engine.trace.records import (
    End,
    Event,
    Finished,
    Header,
    Preempted,
    Queued,
    RequestView,
    Scheduled,
    StepTrace,
    Trace,
)


class Fold:
    """Folds a run's records, given one by one, into the views of its requests.

    After `add` the `views` are those while that step ran; after `settle`, those between it and the next
    step. `cached` has the blocks whose content the prefix cache can find. A record may be added before it
    is complete, as a clock does: `settle` takes what was written into it since. Views are changed in place:
    copy those that you keep. The cost of a step grows with what happens in it, not with the number of
    requests. With `keep_finished` False finished requests are dropped.
    """

    def __init__(self, header: Header | None = None, *, keep_finished: bool = True):
        self.keep_finished = keep_finished
        self.views: dict[str, RequestView] = {}
        self.cached: set[int] = set()
        self.step, self.t = 0, 0.0  # of the next step, once the latest one is settled
        self._block_size = 0  # 0: no prefix caching
        self._record: StepTrace | None = None
        self._num_events = 0
        self._ended: list[tuple[RequestView, str]] = []
        self._changed: list[RequestView] = []  # whose state is one for this step only
        if header is not None:
            self.views = {view.request_id: copy_view(view) for view in header.requests}
            self.cached = set(header.cached_blocks)
            if header.config.get("prefix_caching"):
                self._block_size = header.config["block_size"]

    def add(self, record: StepTrace) -> dict[str, RequestView]:
        """Take the next step; return the views by id. Raise ValueError for a request that was never QUEUED.

        Adding the latest record again changes nothing, so that a clock and a consumer can share a fold."""
        if record is self._record:
            return self.views
        self.settle()
        self._record, self._num_events = record, len(record.events)
        self.step, self.t = record.step, record.t
        for event in record.events:
            self._take(event)
        for request_id, blocks in record.blocks.items():
            self._view(request_id).blocks.extend(blocks)
            self.cached.difference_update(blocks)  # allocated again: their old content is gone
        views = self.views
        for request_id, num_tokens in record.scheduled.items():
            view = views.get(request_id) or self._view(request_id)
            view.state, view.num_scheduled = "decode" if view.is_decode else "prefill", num_tokens
        self._end_requests(record.t_end)
        return self.views

    def settle(self) -> dict[str, RequestView]:
        """Take the results of the latest step: computed tokens, new tokens, finished requests."""
        record, self._record = self._record, None
        if record is None:
            return self.views
        self.step, self.t = record.step + 1, record.t_end
        size = self._block_size
        for request_id, num_tokens in record.scheduled.items():
            view = self.views[request_id]
            before = view.num_computed_tokens
            if request_id in record.draft_token_ids:
                num_drafts = len(record.draft_token_ids[request_id])
                num_accepted = record.num_accepted_tokens.get(request_id, 0)
                num_tokens -= num_drafts - num_accepted
                view.num_draft_tokens += num_drafts
                view.num_accepted_tokens += num_accepted
            view.num_computed_tokens = computed = before + num_tokens
            view.num_scheduled = 0
            if size and computed % size < num_tokens:  # a block was filled
                self.cached.update(view.blocks[before // size : computed // size])
        for request_id, blocks in record.returned_blocks.items():
            del self._view(request_id).blocks[-len(blocks) :]
        for request_id, token_ids in record.new_tokens.items():
            view = self.views.get(request_id) or self._view(request_id)
            if not token_ids:
                continue
            if not view.num_output_tokens:
                view.t_first_token = record.t_end
            view.num_output_tokens += len(token_ids)
            view.t_last_token = record.t_end
        for event in record.events[self._num_events :]:
            self._take(event)
        self._end_requests(record.t_end)
        self._leave_step()
        return self.views

    def close(self, end: End | None) -> dict[str, RequestView]:
        """Take the end, which may have events after the last step."""
        self.settle()
        for event in end.events if end else ():
            self._take(event)
        self._end_requests(self.t)
        self._leave_step()
        return self.views

    def _view(self, request_id: str) -> RequestView:
        try:
            return self.views[request_id]
        except KeyError:
            raise ValueError(
                f"step {self.step} of the trace names request {request_id!r}, which was never QUEUED"
            ) from None

    def _take(self, event: Event) -> None:
        if isinstance(event, Queued):
            given = event.num_prompt_tokens, event.max_tokens, event.priority, event.arrival
            self.views[event.id] = RequestView(event.id, *given, queued_step=self.step, t_queued=event.t)
            return
        view = self._view(event.id)
        if isinstance(event, Preempted):
            view.state, view.running, view.blocks, view.num_computed_tokens = "preempted", False, [], 0
            view.num_preemptions += 1
            self._changed.append(view)
        elif isinstance(event, Scheduled):
            view.running, view.blocks = True, list(event.cached_blocks)
            view.num_computed_tokens = view.num_cached_tokens = event.num_cached_tokens
            elsewhere = event.num_forked_tokens + event.num_external_computed_tokens
            num_hits = event.num_cached_tokens - elsewhere
            if event.num_external_computed_tokens and self._block_size:
                self.cached.update(event.cached_blocks)
            if view.scheduled_step is None:
                view.scheduled_step, view.t_scheduled = self.step, self.t
                view.num_first_cached_tokens = num_hits
            else:
                view.num_resumed_cached_tokens += num_hits
        elif isinstance(event, Finished):
            self._ended.append((view, event.reason))

    def _end_requests(self, t_end: float) -> None:
        """A request that was scheduled ends with the step; any other was aborted before it."""
        for view, reason in self._ended:
            view.finish_reason = reason
            view.t_finished = t_end if view.num_scheduled else self.t
            if not view.num_scheduled:
                view.state, view.running, view.blocks = "finished", False, []
            self._changed.append(view)
        self._ended.clear()

    def _leave_step(self) -> None:
        for view in self._changed:
            if view.finish_reason is None:
                view.state = "waiting" if view.state == "preempted" else view.state
                continue
            view.state, view.running, view.blocks = "finished", False, []
            if not self.keep_finished and self.views.get(view.request_id) is view:
                del self.views[view.request_id]
        self._changed.clear()


def copy_view(view: RequestView) -> RequestView:
    """Return a copy that later steps do not change."""
    return replace(view, blocks=list(view.blocks))


def replay(trace: Trace) -> Iterator[tuple[StepTrace, dict[str, RequestView]]]:
    """Yield (record, {request_id: view}) for each step of a trace, with the views while that step ran.

    The views are changed from step to step: copy those that you keep."""
    fold = Fold(trace.header)
    for record in trace.steps:
        yield record, fold.add(record)
    fold.settle()
