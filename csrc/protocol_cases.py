"""Run the protocol model on programs that keep the rules, and on the same programs with one rule removed.

Prints what every case of SOUND, NOTICED, BROKEN and LIMITS answers; given names, the shortest way into those failures.

    python csrc/protocol_cases.py
    python csrc/protocol_cases.py no-wait-for-count
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from protocol_model import (
    Announce,
    Await,
    AwaitEvent,
    Clear,
    Compare,
    Machine,
    Move,
    Programs,
    Publish,
    Record,
    Remember,
    Result,
    Rows,
    Steps,
    Use,
    announced,
    backward,
    combine,
    combine_backward,
    dispatch,
    dispatch_backward,
    experts,
    experts_backward,
    explore,
    forward,
    lone_dispatch_backward,
    recomputing_backward,
    refused_combine,
    refused_combine_backward,
    refused_dispatch_backward,
    refused_lone_dispatch_backward,
    refused_route,
    route,
    stash,
    stashing_backward,
    weight_gradient,
)


@dataclass(frozen=True)
class Case:
    """A program, what it shows, and what `explore` must answer; `because` is part of the last words of a failure."""

    claim: str
    programs: Programs
    expected: str = "ok"
    because: str = ""
    silent: tuple[int, ...] = ()
    may_time_out: bool = False
    fine: bool = False

    def run(self) -> Result:
        """Explore every interleaving of the case."""
        machine = Machine(self.programs, silent=self.silent, may_time_out=self.may_time_out, fine=self.fine)
        return explore(machine)


def every_rank(num_ranks: int, *streams: Steps) -> Programs:
    """Give each rank the same streams."""
    return {(rank, stream): steps for rank in range(num_ranks) for stream, steps in enumerate(streams)}


def announced_forward(u: Use) -> Steps:
    """Run one layer forward with PROGRESS."""
    return announced(u, route, dispatch) + experts(u) + announced(u, combine)


def announced_backward(u: Use) -> Steps:
    """Run one layer backward with PROGRESS."""
    return announced(u, combine_backward) + experts_backward(u) + announced(u, dispatch_backward)


def without_wait(cell: str, steps: Steps) -> Steps:
    """Drop every wait for the cells of one name."""
    return [s for s in steps if not (isinstance(s, Await) and s.cell.split("[")[0] == cell)]


def without_compare(steps: Steps) -> Steps:
    """Drop every look at PROGRESS that is not part of a wait."""
    return [s for s in steps if not isinstance(s, Compare)]


def without_last_wait(refused: Steps) -> Steps:
    """Drop the wait that ends a refused round."""
    return [s for s in refused if not (isinstance(s, Await) and s.after_refusal)]


def with_epoch(names: Sequence[str], epoch: str | int, steps: Steps) -> Steps:
    """Publish and await cells of these names with another epoch."""
    return [
        replace(s, epoch=epoch) if isinstance(s, (Publish, Await)) and s.cell.split("[")[0] in names else s
        for s in steps
    ]


def swapped(first: str, steps: Steps) -> Steps:
    """Exchange the step whose words begin so with the step after it."""
    at = next(i for i, s in enumerate(steps) if str(s).startswith(first))
    return [*steps[:at], steps[at + 1], steps[at], *steps[at + 2 :]]


def moved(name: str, behind: str, steps: Steps) -> Steps:
    """Take the first step whose words are `name` out, and put it behind the last whose words begin with `behind`."""
    step = next(s for s in steps if str(s) == name)
    rest = [s for s in steps if s is not step]
    at = max(i for i, s in enumerate(rest) if str(s).startswith(behind))
    return [*rest[: at + 1], step, *rest[at + 1 :]]


def sharing(region: str, steps: Steps) -> Steps:
    """Let kernels use workspace 0's rows of a region in place of every workspace's own."""

    def shared(accesses: tuple[Rows, ...]) -> tuple[Rows, ...]:
        return tuple(r._replace(region=f"{region}[0]") if r.region.split("[")[0] == region else r for r in accesses)

    return [replace(s, reads=shared(s.reads), writes=shared(s.writes)) if isinstance(s, Move) else s for s in steps]


def alternated(first: Steps, second: Steps) -> Steps:
    """Issue two equally long lists of steps in turns."""
    return [step for pair in zip(first, second, strict=True) for step in pair]


def layers(num_layers: int, step: int = 0, **options: bool) -> list[Use]:
    """Name the uses of one step: a frame per layer, one workspace for all."""
    return [Use(frame=layer, tag=f"layer {layer} of step {step}", **options) for layer in range(num_layers)]


def recomputing_step(step: int, num_layers: int = 2, **options: bool) -> Steps:
    """Run the layers forward, then backward in reverse, with the received rows in the workspace they share."""
    uses = layers(num_layers, step, recv_in_workspace=True, **options)
    return [s for u in uses for s in forward(u)] + [s for u in reversed(uses) for s in recomputing_backward(u)]


def stashing_step(step: int, num_layers: int = 2, **options: bool) -> Steps:
    """Run the same with rows that are copied into pages after each combine."""
    uses = layers(num_layers, step, recv_in_workspace=True, says_ack=True, **options)
    return [s for u in uses for s in forward(u) + stash(u)] + [s for u in reversed(uses) for s in stashing_backward(u)]


def differing_step(step: int, *, kept_says_ack: bool = True) -> Steps:
    """Run a layer that stashes, then one that keeps its rows, on the workspace that they share."""
    stashed, kept = layers(2, step)
    stashed = replace(stashed, recv_in_workspace=True, says_ack=True)
    kept = replace(kept, says_ack=kept_says_ack)
    return [*forward(stashed), *stash(stashed), *forward(kept), *backward(kept), *stashing_backward(stashed)]


def interrupted(steps: Steps, other: Use) -> Steps:
    """Let another layer dispatch between what brings rows back and the experts that read them."""
    at = next(i for i, s in enumerate(steps) if "weight gradient" in str(s))
    return [*steps[:at], *route(other), *dispatch(other), *steps[at:]]


def restored_beside_a_pull() -> tuple[Steps, Steps]:
    """Bring stashed rows back on stream 1, and run the experts again, after another layer's combine on stream 0."""
    forwards = [*forward(A_STASHED), *stash(A_STASHED), Record("stashed"), *forward(B_STASHED), Record("pulled")]
    steps = stashing_backward(A_STASHED)
    at = next(i for i, s in enumerate(steps) if isinstance(s, Await) and s.cell == A_STASHED.cell("ack"))
    again = steps.index(next(s for s in steps if "weight gradient" in str(s)))
    backwards = [*steps[:at], AwaitEvent("pulled"), *steps[at:again], *experts(A_STASHED), *steps[again:]]
    return forwards, [AwaitEvent("stashed"), *backwards]


def training_step(step: int, num_layers: int = 2, **options: bool) -> Steps:
    """Run the layers forward, then backward in reverse."""
    uses = layers(num_layers, step, **options)
    return [s for u in uses for s in forward(u)] + [s for u in reversed(uses) for s in backward(u)]


A, B, C = layers(3)
A2, B2, _ = layers(3, step=1)
ALIASED = {"recv_in_workspace": True, "alias": True}
A_ALIASED = layers(1, **ALIASED)[0]
A_IN_WORKSPACE, B_IN_WORKSPACE = layers(2, recv_in_workspace=True)
A_STASHED, B_STASHED = layers(2, recv_in_workspace=True, says_ack=True)
OTHER_WORKSPACE = replace(A_ALIASED, workspace=1)
ON_STREAM_1 = Use(frame=1, workspace=1, tag="other stream")
A_BY_WIRE, B_BY_WIRE, C_BY_WIRE = layers(3, by_wire=True)
A2_BY_WIRE = replace(A_BY_WIRE, tag="layer 0 of step 1")
BY_WIRE_ON_STREAM_1 = replace(ON_STREAM_1, by_wire=True)
SHARED_BY_STREAMS = Use(frame=1, workspace=0, tag="other stream")
SHARED_ALIASED = replace(SHARED_BY_STREAMS, **ALIASED)
USED_AFTER_A_REFUSAL = Move("experts of a refused round", writes=(B.expert_out,), by_user=True)

SOUND: dict[str, Case] = {
    "layers-share-a-workspace": Case("forward of two layers", every_rank(3, forward(A) + forward(B))),
    "training-steps": Case("two replays of a step of two layers", every_rank(3, training_step(0) + training_step(1))),
    "training-steps-aliased": Case(
        "received rows in the workspace, and the data regions of a workspace on the same bytes",
        every_rank(3, training_step(0, **ALIASED) + training_step(1, **ALIASED)),
    ),
    "training-steps-staged": Case(
        "the ops stage the experts' rows",
        every_rank(3, training_step(0, in_window=False) + training_step(1, in_window=False)),
    ),
    "training-steps-by-wire": Case(
        "a token crosses once for each rank, both ways",
        every_rank(3, training_step(0, by_wire=True) + training_step(1, by_wire=True)),
    ),
    "training-steps-by-wire-staged": Case(
        "the same with rows that the ops stage, and received rows in the workspace",
        every_rank(
            2, training_step(0, in_window=False, by_wire=True) + training_step(1, in_window=False, by_wire=True)
        ),
    ),
    "recomputing-steps-by-wire": Case(
        "the same where each backward dispatches once more",
        every_rank(2, recomputing_step(0, by_wire=True) + recomputing_step(1, by_wire=True)),
    ),
    "frozen-input-by-wire": Case(
        "the same without a dispatch backward, then with several and no combine backward",
        every_rank(
            3,
            forward(A_BY_WIRE)
            + forward(B_BY_WIRE)
            + combine_backward(B_BY_WIRE)
            + lone_dispatch_backward(A_BY_WIRE)
            + lone_dispatch_backward(B_BY_WIRE)
            + forward(A2_BY_WIRE),
        ),
    ),
    "refusals-by-wire": Case(
        "each op of the backward and combine refused, then the same again",
        every_rank(
            3,
            route(A_BY_WIRE)
            + dispatch(A_BY_WIRE)
            + experts(A_BY_WIRE)
            + refused_combine(A_BY_WIRE)
            + combine(A_BY_WIRE)
            + refused_combine_backward(A_BY_WIRE)
            + combine_backward(A_BY_WIRE)
            + experts_backward(A_BY_WIRE)
            + refused_dispatch_backward(A_BY_WIRE)
            + lone_dispatch_backward(A_BY_WIRE)
            + route(A2_BY_WIRE)
            + dispatch(A2_BY_WIRE),
        ),
    ),
    "two-streams-by-wire": Case(
        "two micro-batches, each with its own stream, frame and workspace",
        every_rank(2, forward(A_BY_WIRE), forward(BY_WIRE_ON_STREAM_1)),
    ),
    "fine-training-steps-by-wire": Case(
        "two steps on two ranks, with stores in flight and cells polled one by one",
        every_rank(2, training_step(0, by_wire=True) + training_step(1, by_wire=True)),
        fine=True,
    ),
    "fine-training-steps": Case(
        "the same on two ranks, with stores in flight and cells polled one by one",
        every_rank(2, training_step(0) + training_step(1)),
        fine=True,
    ),
    "fine-three-ranks": Case(
        "forward of two layers on three ranks, likewise",
        every_rank(3, forward(A) + forward(B)),
        fine=True,
    ),
    "fine-refusals": Case(
        "every kind of refusal, on two ranks, likewise",
        every_rank(
            2,
            refused_route(A)
            + route(A)
            + dispatch(A)
            + experts(A)
            + refused_combine(A)
            + combine(A)
            + refused_combine_backward(A)
            + combine_backward(A)
            + experts_backward(A)
            + refused_dispatch_backward(A)
            + lone_dispatch_backward(A),
        ),
        fine=True,
    ),
    "validation-between-steps": Case(
        "another graph, forward only, between two replays",
        every_rank(3, training_step(0) + forward(Use(tag="validation")) + training_step(1)),
    ),
    "odd-number-of-uses": Case(
        "three replays of one layer: no parity",
        every_rank(3, training_step(0, 1) + training_step(1, 1) + training_step(2, 1)),
    ),
    "rank-without-tokens": Case("T = 0 on one rank", every_rank(3, training_step(0) + training_step(1)), silent=(1,)),
    "frozen-input": Case(
        "the first layer of backward has no dispatch backward",
        every_rank(3, forward(A) + forward(B) + combine_backward(B) + experts_backward(B) + backward(A) + forward(A2)),
    ),
    "lone-dispatch-backward": Case(
        "dispatch backwards without a combine backward, one of them before a whole backward",
        every_rank(
            3,
            forward(A)
            + forward(B)
            + forward(C)
            + lone_dispatch_backward(C)
            + lone_dispatch_backward(B)
            + backward(A)
            + lone_dispatch_backward(A),
        ),
    ),
    "announced-training-step": Case(
        "comparing PROGRESS raises no false alarm, though ranks are at different calls",
        every_rank(3, announced_forward(A) + announced_forward(B) + announced_backward(B)),
    ),
    "announced-refusal-without-workspace": Case(
        "nor does a refusing rank that holds no workspace",
        {
            (0, 0): [
                Announce("refused_route", 0, None),
                *refused_route(A),
                *announced_forward(A),
            ],
            (1, 0): announced(A, refused_route) + announced_forward(A),
            (2, 0): announced(A, refused_route) + announced_forward(A),
        },
    ),
    "abandoned-dispatch": Case(
        "a dispatch without combine, then another layer on the workspace",
        every_rank(3, route(A) + dispatch(A) + experts(A) + forward(B) + forward(A2)),
    ),
    "delayed-weight-gradient": Case(
        "the weight gradient runs after dispatch backward, before the next claim of the workspace",
        every_rank(3, forward(A) + forward(B) + backward(B) + weight_gradient(B) + backward(A) + weight_gradient(A)),
    ),
    "recomputing-steps": Case(
        "each backward dispatches once more into the workspace, and its weight gradient reads the rows there",
        every_rank(2, recomputing_step(0) + recomputing_step(1)),
    ),
    "recomputing-steps-staged": Case(
        "the same on three ranks with rows that the ops stage",
        every_rank(3, recomputing_step(0, in_window=False)),
    ),
    "stashing-steps": Case(
        "each combine copies the received rows into pages, and each backward copies them back into the workspace",
        every_rank(3, stashing_step(0) + stashing_step(1)),
    ),
    "layers-that-differ": Case(
        "one layer stashes and the next keeps its rows: every combine on the workspace says ACK",
        every_rank(3, differing_step(0) + differing_step(1)),
    ),
    "refused-route": Case("a refused route, then the same again", every_rank(3, refused_route(A) + forward(A))),
    "refused-route-without-workspace": Case(
        "the rank that refuses holds no workspace, and its COUNT comes behind its pulls from all; users' kernels go on",
        {
            (0, 0): [*forward(A), Record("pulled")],
            (0, 1): [AwaitEvent("pulled"), *refused_route(B), *forward(B2)],
            (1, 0): [*forward(A), Record("pulled")],
            (1, 1): [AwaitEvent("pulled"), *refused_route(B), USED_AFTER_A_REFUSAL, *forward(B2)],
        },
    ),
    "refused-combine": Case(
        "a refused combine, then the same again",
        every_rank(3, route(A) + dispatch(A) + experts(A) + refused_combine(A) + combine(A) + forward(A2)),
    ),
    "refused-combine-backward": Case(
        "a refused combine backward, then the same again",
        every_rank(3, forward(A) + refused_combine_backward(A) + backward(A) + forward(A2)),
    ),
    "refused-dispatch-backward": Case(
        "a refused dispatch backward, then backward again",
        every_rank(
            3, forward(A) + combine_backward(A) + experts_backward(A) + refused_dispatch_backward(A) + backward(A)
        ),
    ),
    "refused-lone-dispatch-backward": Case(
        "the same without combine backward: the retry begins a use of its own",
        every_rank(3, forward(A) + refused_lone_dispatch_backward(A) + lone_dispatch_backward(A)),
    ),
    "two-streams": Case(
        "two micro-batches, each with its own stream, frame and workspace",
        every_rank(2, forward(A) + backward(A), forward(ON_STREAM_1) + backward(ON_STREAM_1)),
    ),
    "two-streams-in-one-queue": Case(
        "the same when the hardware serialises both, issued in one order on all ranks",
        every_rank(3, alternated(forward(A) + backward(A), forward(ON_STREAM_1) + backward(ON_STREAM_1))),
    ),
    "backward-on-another-stream": Case(
        "forward and backward on two streams; the frame comes back through an event",
        every_rank(
            2,
            [*forward(A), Record("forward"), *forward(B), AwaitEvent("backward"), *forward(A2)],
            [AwaitEvent("forward"), *backward(A), Record("backward")],
        ),
    ),
    "workspace-on-another-stream": Case(
        "a workspace is taken on another stream, behind the pull from it: so is COUNT, which speaks for the pull",
        every_rank(3, [*forward(A_ALIASED), Record("pulled")], [AwaitEvent("pulled"), *forward(SHARED_ALIASED)]),
    ),
    "restore-on-another-stream": Case(
        "rows come back on a stream that is behind this rank's last pull from the workspace, not behind the peers'",
        every_rank(2, *restored_beside_a_pull()),
    ),
    "time-out": Case(
        "any wait may give up, while the ops stage the experts' rows",
        every_rank(2, training_step(0, in_window=False)),
        may_time_out=True,
    ),
    "implied-ack-before-restore": Case(
        "on one stream rows come back without a wait for ACK: GO tells as much",
        every_rank(3, without_wait("ack", stashing_step(0) + stashing_step(1))),
    ),
    "implied-ack-before-go": Case(
        "combine backward without its wait for ACK: GO tells as much",
        every_rank(3, without_wait("grad_ack", training_step(0) + training_step(1))),
    ),
    "implied-ack-after-refused-ready": Case(
        "a refused dispatch backward that does not wait for ACK: the retry does",
        every_rank(3, forward(A) + without_last_wait(refused_lone_dispatch_backward(A)) + lone_dispatch_backward(A)),
    ),
}

NOTICED: dict[str, Case] = {
    "another-frame": Case(
        "one rank took another frame",
        {
            (0, 0): announced_forward(A),
            (1, 0): announced_forward(A),
            (2, 0): announced_forward(B),
        },
        "noticed",
    ),
    "another-workspace": Case(
        "one rank took another workspace: COUNT comes all the same, so PROGRESS is compared after it",
        {
            (0, 0): announced_forward(A_ALIASED),
            (1, 0): announced_forward(A_ALIASED),
            (2, 0): announced_forward(OTHER_WORKSPACE),
        },
        "noticed",
    ),
    "another-op": Case(
        "one rank begins the next layer where the others combine",
        {
            (0, 0): announced_forward(A),
            (1, 0): announced_forward(A),
            (2, 0): announced(A, route, dispatch) + experts(A) + announced_forward(ON_STREAM_1),
        },
        "noticed",
    ),
}

BROKEN: dict[str, Case] = {
    "no-wait-for-count": Case(
        "rows are pushed into a frame whose owner still reads the round before",
        every_rank(2, without_wait("count", forward(A) + backward(A) + weight_gradient(A) + forward(A2))),
        "corrupt",
        "recv[0]",
    ),
    "no-wait-for-arrived": Case(
        "the experts start before the rows are there",
        every_rank(2, without_wait("arrived", forward(A))),
        "corrupt",
        "experts reads recv[0]",
    ),
    "no-wait-for-ready": Case(
        "rows are pulled before the experts wrote them",
        every_rank(2, without_wait("ready", forward(A))),
        "corrupt",
        "pull rows reads expert_out[0]",
    ),
    "no-wait-for-go-after-frozen-input": Case(
        "a dispatch backward is missing in between, and the next epoch replaces one that a peer still awaits",
        every_rank(
            2,
            without_wait("go", forward(A) + forward(B) + combine_backward(B) + experts_backward(B) + backward(A)),
        ),
        "dead-lock",
        "await grad_arrived[0]",
    ),
    "no-wait-for-go-under-weight-gradient": Case(
        "gradients are pushed into a workspace whose owner still computes the weight gradient of the layer before",
        every_rank(2, without_wait("go", forward(A) + forward(B) + backward(B) + weight_gradient(B) + backward(A))),
        "corrupt",
        "grad_expert_out[0]",
    ),
    "no-wait-for-ack-in-dispatch-backward": Case(
        "gradients are staged into rows that a peer still pulls",
        every_rank(
            2,
            forward(A) + forward(B) + without_wait("grad_ack", lone_dispatch_backward(B) + lone_dispatch_backward(A)),
        ),
        "corrupt",
        "pull gradients touches grad_recv[0] of rank 0 under 'stage gradients' of rank 0",
    ),
    "no-wait-for-ack-before-restore": Case(
        "the experts run again into rows that a peer still pulls: GO came on a stream that is not behind that pull",
        every_rank(2, *(without_wait("ack", steps) for steps in restored_beside_a_pull())),
        "corrupt",
        "experts touches expert_out[0]",
    ),
    "ack-of-stashing-layers-only": Case(
        "the layer between says no ACK, and rows that shall come back wait for it",
        every_rank(2, differing_step(0, kept_says_ack=False)),
        "dead-lock",
        "await ack[0]",
    ),
    "count-before-pull": Case(
        "COUNT goes out before the pull from the workspace is over, and a peer pushes into what is pulled",
        every_rank(
            2,
            [*forward(A_ALIASED), Record("pulled")],
            moved("await event pulled", "publish count", [AwaitEvent("pulled"), *forward(SHARED_ALIASED)]),
        ),
        "corrupt",
        "push rows touches forward[0] of rank 0 under 'pull rows' of rank 1",
    ),
    "refused-count-before-pull": Case(
        "a rank refuses on a stream that is not behind its last pull, and a peer's kernels go on into the rows of that",
        {
            (0, 0): forward(A),
            (0, 1): refused_route(B),
            (1, 0): [*forward(A), Record("pulled")],
            (1, 1): [AwaitEvent("pulled"), *refused_route(B), USED_AFTER_A_REFUSAL],
        },
        "corrupt",
        "experts of a refused round touches expert_out[0] of rank 1 under 'pull rows' of rank 0",
    ),
    "wait-skipped-without-rows": Case(
        "a rank with no rows to look for runs ahead; its next COUNT replaces one that a peer still awaits",
        {
            (0, 0): route(A) + dispatch(A) + route(A2) + dispatch(A2),
            (1, 0): without_wait("arrived", route(A) + dispatch(A) + route(A2) + dispatch(A2)),
        },
        "dead-lock",
        "await count[0]",
        silent=(1,),
    ),
    "refused-route-ends-at-count": Case(
        "the retry replaces a COUNT that a peer has not seen",
        every_rank(2, without_last_wait(refused_route(A)) + forward(A)),
        "dead-lock",
        "await count[0]",
    ),
    "refused-combine-ends-at-ready": Case(
        "the retry replaces a READY that a peer has not seen",
        every_rank(2, route(A) + dispatch(A) + experts(A) + without_last_wait(refused_combine(A)) + combine(A)),
        "dead-lock",
        "await ready[0]",
    ),
    "refused-combine-backward-ends-at-go": Case(
        "the retry replaces a GO that a peer has not seen",
        every_rank(2, forward(A) + without_last_wait(refused_combine_backward(A)) + backward(A)),
        "dead-lock",
        "await go[0]",
    ),
    "retry-keeps-the-use": Case(
        "a dispatch backward after a refused one takes the READY of that one for its own",
        every_rank(
            2,
            forward(A) + refused_lone_dispatch_backward(A) + dispatch_backward(replace(A, in_window=False)),
        ),
        "corrupt",
        "grad_recv[0]",
    ),
    "epoch-per-lease": Case(
        "READY carries the round of the frame, and two frames in one workspace are in the same round",
        every_rank(
            2,
            with_epoch(["ready"], A.round, forward(A)) + with_epoch(["ready"], B.round, forward(B)),
        ),
        "corrupt",
        "wants 'layer 1 of step 0 out', finds 'layer 0 of step 0 out'",
    ),
    "recompute-without-claim": Case(
        "the next layer dispatches into the workspace before the weight gradient has read the rows that came back",
        every_rank(2, forward(A_IN_WORKSPACE) + interrupted(recomputing_backward(A_IN_WORKSPACE), B_IN_WORKSPACE)),
        "corrupt",
        "experts backward with its weight gradient",
    ),
    "restore-without-claim": Case(
        "the same with rows that were copied back",
        every_rank(
            2,
            forward(A_STASHED) + stash(A_STASHED) + interrupted(stashing_backward(A_STASHED), B_STASHED),
        ),
        "corrupt",
        "experts backward with its weight gradient",
    ),
    "stash-after-next-count": Case(
        "rows are copied into pages after the next dispatch has said that they may be overwritten",
        every_rank(2, forward(A_STASHED) + route(B_STASHED) + stash(A_STASHED) + dispatch(B_STASHED)),
        "corrupt",
        "stash rows",
    ),
    "expanded-before-arrived": Case(
        "rows are copied into their slots before they are there",
        every_rank(2, moved("expand rows", "push rows", forward(A_BY_WIRE))),
        "corrupt",
        "expand rows reads slots[0] of rank 1",
    ),
    "expanded-after-next-count": Case(
        "rows are copied into their slots after the next dispatch has said that they may be overwritten",
        every_rank(
            2,
            moved("expand rows", "publish count", route(A_BY_WIRE) + dispatch(A_BY_WIRE) + route(B_BY_WIRE))
            + dispatch(B_BY_WIRE),
        ),
        "corrupt",
        "wire_rows[0]",
    ),
    "added-after-ready": Case(
        "sums are pulled before they are made",
        every_rank(2, moved("add rows", "publish ready", forward(A_BY_WIRE))),
        "corrupt",
        "wire_rows[0]",
    ),
    "pushed-while-expanded": Case(
        "without COUNT a peer sends the next rows while these are still copied into their slots",
        every_rank(
            2,
            without_wait("count", route(A_BY_WIRE) + dispatch(A_BY_WIRE) + route(B_BY_WIRE) + dispatch(B_BY_WIRE)),
        ),
        "corrupt",
        "wire_rows[0]",
    ),
    "slots-before-count": Case(
        "a rank computes its next slots while a peer still looks there for where its rows belong",
        every_rank(
            2, route(A_BY_WIRE) + dispatch(A_BY_WIRE) + moved("compute slots", "advance round", route(A2_BY_WIRE))
        ),
        "corrupt",
        "expand rows touches slots[0] of rank 0 under 'compute slots' of rank 0",
    ),
    "sums-shared-by-workspaces": Case(
        "sums are made where a peer still pulls others, whose workspace's ACK nobody awaits",
        every_rank(
            2,
            forward(A_BY_WIRE)
            + forward(BY_WIRE_ON_STREAM_1)
            + sharing(
                "grad_wire_rows", lone_dispatch_backward(A_BY_WIRE) + lone_dispatch_backward(BY_WIRE_ON_STREAM_1)
            ),
        ),
        "corrupt",
        "pull gradients touches grad_wire_rows[0] of rank 0 under 'add gradients' of rank 0",
    ),
    "wire-rows-shared-by-workspaces": Case(
        "two streams have a workspace each, and one region of rows by wire",
        every_rank(2, sharing("wire_rows", forward(A_BY_WIRE)), sharing("wire_rows", forward(BY_WIRE_ON_STREAM_1))),
        "corrupt",
        "wire_rows[0]",
    ),
    "workspace-without-claim": Case(
        "two streams use one workspace at once",
        every_rank(2, forward(A), forward(SHARED_BY_STREAMS)),
        "corrupt",
        "expert_out[0]",
    ),
    "counters-reset-by-acquire": Case(
        "the epochs of the second dispatch have been seen before",
        every_rank(2, [*forward(A), Remember(A.round, "zero"), *forward(A2)]),
        "corrupt",
        "wants 'layer 0 of step 1', finds 'layer 0 of step 0'",
    ),
    "cells-cleared-by-release": Case(
        "a fast peer has published its next COUNT when the frame is released",
        every_rank(2, [*forward(A), Clear(A.cell("count")), *forward(A2)]),
        "dead-lock",
        "await count[0]",
    ),
    "epochs-baked-into-a-graph": Case(
        "the second replay publishes the epochs of the first",
        every_rank(2, with_epoch(["count", "arrived", "ready"], 1, forward(A) + forward(A2))),
        "corrupt",
        "wants 'layer 0 of step 1', finds 'layer 0 of step 0'",
    ),
    "rows-not-released": Case(
        "ARRIVED may overtake the rows that it announces",
        every_rank(2, swapped("push rows", forward(A))),
        "corrupt",
        "experts reads recv[0]",
    ),
    "rows-not-acquired": Case(
        "rows may be read before READY has been seen",
        every_rank(2, swapped("await ready", forward(A))),
        "corrupt",
        "pull rows reads expert_out[0]",
    ),
    "pull-not-released": Case(
        "ACK may overtake the pull that it ends",
        every_rank(
            2,
            forward(A) + forward(B) + swapped("pull gradients", lone_dispatch_backward(B)) + lone_dispatch_backward(A),
        ),
        "corrupt",
        "grad_recv[0]",
    ),
    "frame-reused-without-event": Case(
        "the next forward on stream 0 does not wait for the backward on stream 1",
        every_rank(2, [*forward(A), Record("forward"), *forward(A2)], [AwaitEvent("forward"), *backward(A)]),
        "corrupt",
        "slots[0]",
    ),
    "frame-reused-before-backward": Case(
        "no claim keeps the frame until its backward",
        every_rank(2, forward(A) + forward(A2) + backward(A)),
        "corrupt",
        "wants 'layer 0 of step 0', finds 'layer 0 of step 1'",
    ),
    "weight-gradient-after-next-claim": Case(
        "it reads rows of a workspace that the next layer has taken",
        every_rank(2, forward(A) + forward(B) + backward(B) + backward(A) + weight_gradient(B)),
        "corrupt",
        "wants 'layer 1 of step 0 grad out', finds 'layer 0 of step 0 grad out'",
    ),
    "no-compare-after-count": Case(
        "a rank with another workspace passes COUNT, and rows are pushed where nobody looks for them",
        {
            (0, 0): without_compare(announced_forward(A_ALIASED)),
            (1, 0): without_compare(announced_forward(OTHER_WORKSPACE)),
        },
        "corrupt",
        "finds 'nothing'",
    ),
    "another-order-on-one-rank": Case(
        "two ranks issue two leases in opposite order",
        {(0, 0): forward(A) + forward(ON_STREAM_1), (1, 0): forward(ON_STREAM_1) + forward(A)},
        "dead-lock",
        "await count",
    ),
}

LIMITS: dict[str, Case] = {
    "time-out-under-a-producer-in-the-window": Case(
        "a rank that gave up waiting keeps running its experts, into rows that a slow peer still pulls",
        every_rank(2, forward(A) + forward(B)),
        "corrupt",
        "pull rows touches expert_out[0] of rank 0 under 'experts' of rank 0",
        may_time_out=True,
    ),
}


def table(names: Sequence[str] = ()) -> Iterator[str]:
    """Run the cases named, or all, and give a line for each; for names also the way into the failure."""
    cases = SOUND | NOTICED | BROKEN | LIMITS
    for name in names or cases:
        result = cases[name].run()
        yield f"{name:40s} {result.verdict:9s} {result.num_states:6d} states  {cases[name].claim}"
        if names:
            yield from result.trace


if __name__ == "__main__":
    for line in table(sys.argv[1:]):
        sys.stdout.write(line + "\n")
