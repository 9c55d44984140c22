"""The step of a sharded optimizer: flat shards are stepped in place of parameters, by an *inner* optimizer of the user's class.

The user's own object (assembly/sharded_optimizer.py) calls it. A model has one core for each of its optimizers, which has the runs
of its parameters. One step has three phases:

    agree     local square sums -> global norm; non-finite anywhere: every rank skips
    update    scale (clip, loss scale), masters <- inner optimizer, parameters <- masters
    publish   replicated parameters are gathered again; sharded ones are gathered when they are next used

Options are read from the outer param_groups before every step. Norms add shards in a fixed order: stages agree bit for bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from ..config import Placement, Tier
from ..errors import NonFiniteError, ZeroshardError
from ..utils.autograd import in_backward
from .comm.messages import exchange_values
from .gradient_account import Clipped
from .inner_optimizer import Options, fresh, inner_copy, step_together
from .ledger import OPTIMIZER, claimed
from .runs import Run, RunMaker, state_tensors
from .runtime import Runtime
from .steppers import Job, Steppers
from .unit import ParamGroup
from .user_hooks import ONE_OPTIMIZER
from .verbs import begin


@dataclass(frozen=True)
class StepRecord:
    """The outcome of one call of `optimizer.step()`.

    Attributes:
        grad_norm: global norm of the mean gradient before clipping, without the loss scale; where zs.clip_grad_norm_ was not called:
            without the gradients of the model's other optimizers, and under FSDP2's door (zeroshard.fsdp) of its own parameters alone.
        clip_coefficient: the factor by which gradients were clipped; 1.0 where they were not.
        skipped: True if no parameter was stepped, because gradients were not finite or no parameter had one.
        nonfinite: "name (rank r)" of each parameter whose gradient was not finite.
        loss_scale: the loss scale of fp16 before the step.
    """

    grad_norm: float
    clip_coefficient: float
    skipped: bool
    nonfinite: tuple[str, ...] = ()
    loss_scale: float = 1.0

    @property
    def clipped_norm(self) -> float:
        """Global norm after clipping."""
        return self.grad_norm * self.clip_coefficient


class Tally:
    """Counts of an optimizer's `step` calls and of its skipped steps, now and at each scheduler's last step.

    holds: whether schedulers must not advance after skipped steps (Config.hold_schedulers).
    """

    def __init__(self, holds: bool) -> None:
        self.holds = holds
        self.asked = self.skipped = 0
        self.scheduling = False  # True inside a scheduler's step: those that it chains step with it, and do not ask `counts`
        self._seen: WeakKeyDictionary[lr_scheduler.LRScheduler, tuple[int, int]] = WeakKeyDictionary()

    @property
    def schedulers(self) -> list[lr_scheduler.LRScheduler]:
        """The schedulers that have stepped since sharding, in the order of their first step."""
        return list(self._seen)

    def note(self, record: StepRecord) -> StepRecord:
        """Count the step of a record, and return the record. A step without gradients does not count as skipped."""
        self.asked += 1
        self.skipped += record.skipped and not math.isfinite(record.grad_norm)
        return record

    def counts(self, scheduler: lr_scheduler.LRScheduler) -> bool:
        """Return whether a scheduler may step: not if `holds` and the optimizer has skipped each step since it was last asked."""
        asked, skipped = self._seen.get(scheduler, (0, 0))
        self._seen[scheduler] = self.asked, self.skipped
        return not self.holds or self.asked == asked or self.asked - asked > self.skipped - skipped


class OptimizerCore:
    """The implementation of a sharded optimizer, found as `optimizer.core`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, runtime: Runtime, steppers: Steppers, check: Callable[[OptimizerCore], None]
    ) -> None:
        """check: raises ConfigError before a step whose parameter groups are not those that zs.shard has seen."""
        self.outer, self.runtime, self.comm, self.world = optimizer, runtime, runtime.comm, runtime.topology.world
        self.replicated = runtime.config.row.optimizer is Placement.REPLICATED
        self.inner = inner_copy(optimizer)
        self.maker = RunMaker(self.inner.state, runtime.tiers, steppers.alone)
        self.whole, self.device, self.host, self.delayed = steppers.whole, steppers.device, steppers.host, steppers.delayed
        self.check = check
        if self.host is not None:
            runtime.gate.steppers.append(self.host)
        if self.delayed is not None:
            runtime.gate.delayed = self.delayed
        self.runs: list[list[Run]] = []
        self.parted = False  # True after a write to one parameter's state has split its run (state_view.py)
        self.members: list[list[Tensor]] = []
        self.group_of: dict[int, int] = {}  # id of a parameter of the model -> number of its group
        self.outside: list[list[Tensor]] = []  # for each group its parameters that are not the model's, stepped as they are
        self.indices: dict[ParamGroup, list[int]] = {}  # the parameters in its groups
        self._take_groups()
        self.last_step: StepRecord | None = None
        self.allied = [self]  # the cores of this rank's pipeline stages, which share one norm and one decision to skip a step
        self.after_step = runtime.optimizers.after_step
        self.tally = Tally(runtime.config.hold_schedulers)
        self.agree: Callable[[], None] | None = None  # called once, before the first step, if it was made after zs.shard
        self._skipped_in_a_row = 0
        self._state_nbytes = 0

    def _take_groups(self) -> None:
        """Make the runs of all groups that have none yet."""
        first, groups = len(self.runs), self.outer.param_groups
        own = {id(param): group for group in self.runtime.groups for param in group.params}
        self.members += [list(group["params"]) for group in groups[first:]]
        self.outside += [[param for param in members if id(param) not in own] for members in self.members[first:]]
        new = {id(p): number for number, g in enumerate(groups[first:], first) for p in g["params"] if id(p) in own}
        self.runs += [[] for _ in groups[first:]]
        self.group_of |= new
        for group in self.runtime.groups:
            if not group.trainable:
                continue
            for number, run in self.maker.runs(group, [new.get(id(param)) for param in group.params]):
                self.runs[number].append(run)
            if found := [index for index, param in enumerate(group.params) if id(param) in self.group_of]:
                self.indices[group] = found

    def take_group(self, alone: set[int]) -> None:
        """Take the group that was added to the user's optimizer. alone: see `RunMaker`."""
        self.inner.param_groups.append({**self.outer.param_groups[-1], "params": []})
        self.maker.alone = alone
        self._take_groups()

    @property
    def place(self) -> int:
        """The number of the first parameter that it steps: an order of a model's optimizers that is the same on every rank."""
        return min((group.specs[index].number for group, own in self.indices.items() for index in own), default=-1)

    @property
    def remark(self) -> str:
        """Name this optimizer, of several of a model, for labels of what ranks do in its step: they are the same on every rank."""
        if len(self.cores) == 1:
            return ""
        names = {group.specs[index].number: group.specs[index].name for group, own in self.indices.items() for index in own}
        return f" of {type(self.outer).__name__} ({names[self.place]}, ...)" if names else f" of {type(self.outer).__name__}"

    def _number(self, run: Run) -> int:
        """Return the number of the optimizer's group that has a run's parameters."""
        return self.group_of[id(run.group.params[run.indices[0]])]

    @property
    def all_runs(self) -> list[Run]:
        """The runs of all of the optimizer's groups."""
        return [run for runs in self.runs for run in runs]

    @property
    def reduced_groups(self) -> list[ParamGroup]:
        """The model's groups of which some rank has a gradient: the same on every rank."""
        return [group for group in self.runtime.groups if group.has_reduced]

    @property
    def stepped_groups(self) -> list[ParamGroup]:
        """The groups of `reduced_groups` with a gradient of a parameter that this optimizer steps."""
        own = self.indices
        return [group for group in self.reduced_groups if group in own and any(group.active[index] for index in own[group])]

    @property
    def cores(self) -> list[OptimizerCore]:
        """The cores of all optimizers of this model."""
        return [each.core for each in self.runtime.optimizers.sharded] or [self]

    # -- agree -----------------------------------------------------------------------------------------------

    def global_norm(self, without: Collection[int], stepping: bool) -> tuple[float, float]:
        """Return the norm of the mean gradient over all ranks, and the divisor that turns gradients into that mean (collective).

        The norm is non-finite if any element is. The divisor is the loss scale times the mean weight (zs.backward). without: ids of
        parameters that do not enter the norm. stepping: this optimizer does.
        """
        account = self.runtime.account
        scale = 1.0 if account.unscaled else self.runtime.progress.loss_scale  # the loss scale that reduced gradients still carry
        counted = [[group for group in core.reduced_groups if group.counts] for core in self.allied]
        total = sum(self.runtime.reductions.square_sum(groups, without) for groups in counted) / scale**2
        watches, topology = [core.runtime.values for core in self.allied], self.runtime.topology
        fingerprints = [watch.fingerprint() for watch in watches]  # of what programs wrote: ranks compare them below
        # ranks along model axes see the same batches: with several places, weights are added up in each place, not over the world
        weights = (account.weight, account.unweighted) if len(topology.places) > 1 else ()
        form = struct.Struct(f"<{'d?' if weights else ''}{len(watches)}Q")
        again = "" if self._found() is None else " anew (it was not finite, or gradients were written since, or dropped)"
        (total, weight, weighted, plain), told = self.world.compare(
            form.pack(*weights, *fingerprints), f"optimizer step{self.remark if stepping else ''}: gradient norm{again}{self.runtime.attendance.remark()}",
            (total, account.weight, bool(account.weight), account.unweighted),
        )  # fmt: skip
        rows = [(*weights, *fingerprints)] * self.world.world_size if told is None else [form.unpack(part) for part in told]
        for number, watch in enumerate(watches, len(weights)):
            watch.agree([rows[rank][number] for rank in topology.place])
        mixed = weighted and plain
        if weights:
            places = [[rows[rank] for rank in ranks] for ranks in topology.places]
            weight = max(sum(row[0] for row in place) for place in places)
            mixed = any(any(w for w, *_ in each) and any(p for _, p, *_ in each) for each in places)
        if mixed:
            raise ZeroshardError(
                "some gradients of this step are from zs.backward(model, loss, weight=...), others from a plain backward(): "
                "there is no mean of both. Call zs.backward for all of them, on all ranks, or for none."
            )
        for core in self.allied:
            spoiled = core.runtime.account.no_mean(bool(weighted))
            spoiled = spoiled & core.runtime.with_gradients if spoiled else spoiled
            if spoiled & core.group_of.keys() if stepping else spoiled.difference(without):
                raise ZeroshardError(
                    "gradients of zs.backward(model, loss, weight=...) were added to some that an earlier step or zs.clip_grad_norm_ has "
                    "divided, or a zero_grad dropped a part of them: they are no mean. Call zero_grad() of each optimizer right after its "
                    "step, or model.zero_grad()."
                )
        mean = weight / self.comm.world_size if weight else 1.0  # gradients are sum(weight * g) / ranks, if Topology.summed is 1
        return (math.sqrt(total) if total >= 0 else math.nan) / mean, scale * mean

    def clip(self, max_norm: float | None) -> float:
        """Undo loss scale and weights, and scale all gradients so that their global norm is at most `max_norm` (collective).

        Return the norm before clipping, which the next step uses again. If it is not finite, gradients stay as they are, and the
        step computes the norm again, on all ranks: the program may have repaired the gradients by then.
        """
        self.runtime.flush()
        self.runtime.attendance.tell("clip", max_norm)
        return self._clip(max_norm)

    def _clip(self, max_norm: float | None, stepping: bool = False, without: Collection[int] = ()) -> float:
        """Clip as `clip` does. without: ids of parameters whose gradients this optimizer leaves alone."""
        found = self._known()
        if found is None or found.partial:
            for core in self.allied:
                if not core.runtime.hides_sums:
                    core.runtime.flush(core.group_of if stepping else None)
            norm, divisor = self.global_norm(without, stepping)
        elif found.of_ally and found.max_norm == max_norm:  # the clip of another stage's core has scaled these gradients too
            self.runtime.account.clipped[self] = replace(found, of_ally=False)
            return found.norm
        else:
            norm, divisor = found.norm * found.coefficient, 1.0  # an earlier clip for this step has scaled the gradients
        coefficient = 1.0
        if self._usable(norm) and max_norm is not None:
            coefficient = min(max_norm / (norm + 1e-6), 1.0)  # min() in this order keeps a NaN, as torch does
        for core in self.allied:
            account = core.runtime.account
            if core._usable(norm):
                core._scale(coefficient, divisor, stepping and core is self, without)
                account.undone(core.runtime.progress.scaler is not None, core.runtime.with_gradients)
            clipped = Clipped(norm, coefficient, max_norm, core.runtime.gradient_writes(), of_ally=core is not self)
            account.clipped |= dict.fromkeys([core] if without else [core, *core.cores], clipped)
        return norm

    @torch.no_grad()
    def _scale(self, coefficient: float, divisor: float, stepping: bool, without: Collection[int]) -> None:
        """Divide all gradients by the divisor, and multiply those of parameters that are not in `without` by the coefficient."""
        factor = coefficient / divisor
        for group in self.reduced_groups if (coefficient, divisor) != (1.0, 1.0) else ():
            part = group.parts(without) if without else None
            if part is None:
                group.gradients.scale(factor, stepping)
                continue
            if divisor != 1.0:
                group.gradients.scale(1.0 / divisor)
            if coefficient != 1.0:
                group.change_gradients(part, lambda gradient: gradient.mul_(coefficient))

    def _found(self) -> Clipped | None:
        """Return the last clip for this optimizer's next step."""
        return self.runtime.account.clipped.get(self)

    def _known(self) -> Clipped | None:
        """Return the last clip, if its norm is usable and gradients have not been written since; else None."""
        if (found := self._found()) is None or not self._usable(found.norm) or found.writes != self.runtime.gradient_writes():
            return None
        return found

    def _usable(self, norm: float) -> bool:
        """Return True if a step is taken with gradients of this norm."""
        return math.isfinite(norm) or not (self.runtime.config.skip_nonfinite or self.runtime.progress.scaler is not None)

    # -- step ------------------------------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Take one step (collective). If no rank has a gradient, step nothing and return a record with skipped=True."""
        runtime = self.runtime
        begin(runtime, "optimizer.step")
        if runtime.in_backward and in_backward():
            raise ZeroshardError(
                f"{type(self.outer).__name__}.step() inside a backward of its model (in a hook), where gradients are not yet averaged over the "
                f"ranks. {ONE_OPTIMIZER}"
            )
        for unit in runtime.units:
            unit.check_unchanged()
            if unit.pinned:
                raise ZeroshardError(
                    f"optimizer.step() was called inside zs.gathered, with {unit.name} gathered: call it after that `with` block."
                )
        self.check(self)
        if not runtime.hides_sums:  # else the step is one without gradients
            runtime.flush(self.group_of)
        runtime.attendance.tell("step", plain_options(self.outer))
        self.last_step = self._agree_and_step()
        self.comm.progress.step_over(runtime.attendance.steps)
        return self.last_step

    def _agree_and_step(self) -> StepRecord:
        runtime, account = self.runtime, self.runtime.account
        several = len(list(runtime.optimizers)) > 1
        if self.agree is not None:
            self.agree()
            self.agree = None
        if not self.stepped_groups and self.world is self.comm:
            # raises where other ranks do have gradients
            self.comm.exchange(b"", f"optimizer step{self.remark} without gradients")
            runtime.attendance.steps += account.begins_step(self)
            outside = any(self.outside)
            if outside:
                self.publish(self._update(True))
            return self.tally.note(StepRecord(0.0, 1.0, skipped=not outside))
        scale, without = runtime.progress.loss_scale, set[int]()
        found = self._found()
        if meets := self._known() is None and not (found is not None and found.refused):
            if found is not None and not self._usable(found.norm):  # clip again: the first clip met inf or nan
                self._clip(found.max_norm, stepping=True)
            else:
                without = runtime.optimizers.left_alone(self.outer)
                self._clip(runtime.config.max_grad_norm, stepping=True, without=without)
        elif several:  # clipped before the step, in which ranks have to agree on whose it is
            self.world.exchange(b"", f"optimizer step{self.remark}")
            meets = True
        runtime.attendance.steps += account.begins_step(self)
        clipped = account.clipped.pop(self)
        norm, coefficient = clipped.norm, clipped.coefficient
        if not self._usable(norm):
            return self._skip(norm, scale, without)
        self.publish(self._update(meets))
        self._skipped_in_a_row = 0
        if account.advances():
            runtime.progress.note_step(skipped=False)
        for follow in list(self.after_step.values()):
            follow()
        return self.tally.note(StepRecord(norm, coefficient, skipped=False, loss_scale=scale))

    def _skip(self, norm: float, scale: float, without: Collection[int]) -> StepRecord:
        """Record a skipped step on every rank and allied core, with those at fault of all parameters `without` some; raise after too many."""
        names = tuple(dict.fromkeys(name for core in self.allied for name in core._nonfinite_names(without)))
        for core in self.allied:
            if core is not self:
                writes = core.runtime.gradient_writes()
                core.runtime.account.clipped[core] = Clipped(norm, 1.0, None, writes, of_ally=True, refused=True)
        self.runtime.account.skipped.add(self)
        self.last_step = self.tally.note(StepRecord(norm, 1.0, skipped=True, nonfinite=names, loss_scale=scale))
        self._skipped_in_a_row += 1
        self.runtime.progress.note_step(skipped=True)
        limit = self.runtime.config.max_skipped_steps
        if self._skipped_in_a_row >= limit:
            hint = (
                " With fp16 this happens to models trained in bf16: use precision='bf16'."
                if self.runtime.progress.scaler is not None
                else " Check the data and the learning rate."
            )
            raise NonFiniteError(f"{limit} steps in a row had non-finite gradients (last: {', '.join(names[:5])}).{hint}")
        return self.last_step

    def _nonfinite_names(self, without: Collection[int]) -> tuple[str, ...]:
        """Return "name (rank r)" for non-finite gradients: r has sent the value; "shard of rank r" if no sender is known."""
        groups = self.reduced_groups
        senders = [sorted(group.gradients.culprits) for group in groups]
        mine = [
            (number, spec.name)
            for number, group in enumerate(groups)
            for index, spec in enumerate(group.specs)
            if id(group.params[index]) not in without and not torch.isfinite(group.homes[index].fetch(gradient=True)).all()
        ]
        everyone = exchange_values(self.comm, (mine, senders), "optimizer step: names of non-finite gradients")
        found: dict[str, None] = {}
        for rank, (names, own) in enumerate(everyone):
            for number, name in names:  # in two hops, the rank that sums a sender's part may not own the shard
                ranks = own[number] or sorted({sender for _, theirs in everyone for sender in theirs[number]})
                found[f"{name} (rank {', '.join(map(str, ranks))})" if ranks else f"{name} (shard of rank {rank})"] = None
        if self.world is not self.comm:
            everywhere = exchange_values(self.world, list(found), "optimizer step: names of non-finite gradients of all places")
            found = dict.fromkeys(name for names in everywhere for name in names)
        return tuple(found)

    @torch.no_grad()
    def _update(self, met: bool) -> list[ParamGroup]:
        """Step this rank's shards; return the groups whose parameters were written, the same on every rank.

        met: the ranks have exchanged the norm in this step, which was the barrier. A clip before the step was none: the program may
        have run a forward since, in which a slower peer still reads this rank's shards.
        """
        groups = self.stepped_groups
        # each rank steps what the program has written to other ranks' slices, too
        behind = self.replicated and self.runtime.catch_up()
        self.comm.fence_write(synchronised=met and not behind)
        self.runtime.gate.invalidate()
        stepped = set(map(id, groups))
        self.runtime.gate.refresh(groups)
        published = self._publish_delayed() if self.delayed is not None else []
        self._rearrange(stepped)
        self._copy_options(self.outer, self.inner)
        runs = [run for run in self.all_runs if id(run.group) in stepped and run.active]
        runs, whole = [run for run in runs if not run.whole], [run for run in runs if run.whole]
        options, attributes = list[Options](), Options()
        slabs = [run for run in runs if run.tensor is None and not run.offloaded]
        if self.host is not None or slabs or whole:
            # As before the step: steppers restore these for each chunk, so that a class which counts steps in them counts one,
            # not one a chunk. Copies, since schedulers write into a learning rate's tensor during a delayed update.
            own = vars(self.inner).items()
            options = [fresh({k: v for k, v in group.items() if k != "params"}) for group in self.inner.param_groups]
            attributes = fresh({k: v for k, v in own if k not in _NOT_COPIED and isinstance(v, (int, float, Tensor))})
        self._step_in_place(runs)
        if slabs:
            self.device.step(self._jobs(slabs, options, attributes))
        if self.host is not None:
            self._step_on_host([run for run in runs if run.offloaded], options, attributes)
        for run, changed in self.whole.step([(run, options[self._number(run)]) for run in whole]) if whole else ():
            self.inner.param_groups[self._number(run)].update(changed)
        self._copy_options(self.inner, self.outer)  # some classes count their steps in options or attributes
        for group in groups:
            if group.masters.split and not self.replicated:
                group.values.cancel_fetch()  # a fetched copy has the old values
            elif group.masters.rest is not None and group.offload.tier is Tier.DEVICE:
                self._put_values(group, group.masters.rest.load(0, group.masters.rest.numel))
            if group.gradients.replicated:
                group.gradients.apply_factor()  # since p.grad is a view of it
        self.states_changed()
        # groups whose gradients a delayed update has taken over are no longer in `stepped_groups`: the next step publishes them
        return list(dict.fromkeys([*published, *self.stepped_groups]))

    def _step_in_place(self, runs: list[Run]) -> None:
        """Step the runs that have a tensor, all at once."""
        stepped = [(run, run.tensor) for run in runs if run.tensor is not None]
        for run, leaf in stepped:
            leaf.grad = run.group.gradients.in_step(run.start, run.stop, leaf.dtype)
        leaves = [
            [
                *(run.tensor for run in runs if run.tensor is not None and not run.whole),
                *(p for p in outside if p.grad is not None),
            ]
            for runs, outside in zip(self.runs, self.outside, strict=True)
        ]
        slabs = [any(run.tensor is None and not run.whole for run in runs) for runs in self.runs]
        with self.runtime.tiers.stepping(self.inner.param_groups):
            step_together(self.inner, leaves, slabs, self.comm.device)
        for _, leaf in stepped:
            leaf.grad = None

    def _put_values(self, group: ParamGroup, stepped: Tensor) -> None:
        """Write the rounded masters into the parameters."""
        if self.replicated:
            group.values.full.copy_(stepped)
        else:
            group.values.cancel_fetch()
            rest = group.values.rest
            rest.store(0, stepped if rest.resident else stepped.to(rest.dtype))  # round first, then move fewer bytes

    def _jobs(self, runs: list[Run], options: list[Options], attributes: Options, publish: bool = False) -> list[Job]:
        """Return the jobs of stepping runs slab by slab. options: of each optimizer group."""
        number, jobs = self.runtime.progress.steps, []
        for run in runs:
            grads = run.group.gradients
            jobs.append(Job(run, options[self._number(run)], attributes, grads.resting(), grads.factor, publish, number))
        return jobs

    def _step_on_host(self, runs: list[Run], options: list[Options], attributes: Options) -> None:
        """Step the offloaded runs, in the model's order, now or as a delayed update. options: of each optimizer group."""
        assert self.host is not None
        jobs, warm_up = self._jobs(runs, options, attributes, publish=True), self.runtime.config.delayed_update
        if warm_up is None or self.runtime.progress.steps < warm_up:
            self.host.step(jobs)
            return
        assert self.delayed is not None
        rests = {group: group.gradients.hand_over() for group in dict.fromkeys(run.group for run in runs)}
        for job in jobs:
            job.run.group.active = [False] * len(job.run.group.specs)
            job.gradient, job.publish = rests[job.run.group], False
        self.delayed.start(jobs)

    def _publish_delayed(self) -> list[ParamGroup]:
        """Write the masters of the delayed update into the parameters; return the groups that it has stepped."""
        assert self.delayed is not None
        groups = list(dict.fromkeys(job.run.group for job in self.delayed.take()))
        self.runtime.gate.refresh(groups)  # masters take the user's writes since the update began, else these would be lost
        for group in groups:
            self._put_values(group, group.masters.stepped.host(0, group.masters.stepped.numel))
        return groups

    @torch.no_grad()
    def drain(self) -> None:
        """Finish a delayed update, so that parameters, masters and states are of one step (collective if one was pending)."""
        self.runtime.gate.wait()
        if self.delayed is not None and self.delayed.unpublished:
            self.comm.fence_write()  # until no peer reads the shards that `_publish_delayed` writes
            self.runtime.gate.invalidate()
            self.publish(self._publish_delayed())

    def _rearrange(self, stepped: set[int]) -> None:
        """Join the runs that writes to states have split, if their states are of equal kind again.

        Then split each run that has a parameter without a gradient on any rank, so that this parameter keeps its state.
        """
        if self.parted:
            self.runs, self.parted = self.maker.joined(self.runs, self.runtime.groups), False
        for number, runs in enumerate(self.runs):
            result: list[Run] = []
            for run in runs:
                active = [run.group.active[i] for i in run.indices] if id(run.group) in stepped else [False]
                result += self.maker.split(run) if len(set(active)) > 1 else [run]
            self.runs[number] = result

    @staticmethod
    def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
        """Copy the groups' options, and the attributes that the optimizer's class keeps on the object (a step count, say)."""
        for name, value in vars(source).items():
            if name not in _NOT_COPIED and not name.endswith("_hooks"):
                vars(target)[name] = value
        for given, kept in zip(source.param_groups, target.param_groups, strict=True):
            for key, value in given.items():
                if key != "params":
                    kept[key] = value

    def publish(self, written: list[ParamGroup]) -> None:
        """Mark parameters as written, for autograd; all-gather, from stepped shards, those that ranks have whole (collective)."""
        for group in written:
            group.mark_written()
        if self.replicated:  # each rank has stepped the whole
            for group in written:
                group.values.behind = False
        else:
            works = [g.gather() for g in written if g.values.replicated]
            for work in works:
                work.wait()
            if works:
                self.comm.exchange(b"", "parameters gathered")  # no rank may write shards that a peer still copies
        self.comm.fence_read()  # until all ranks have written their shards, which the next gathers read

    def states_changed(self) -> None:
        """Enter the inner optimizer's states in the ledger; `Tiers.rest` enters columns of shards when it makes them."""
        held = state_tensors(self.inner.state)
        nbytes = sum(tensor.nbytes for tensor in held)
        if nbytes != self._state_nbytes:
            for tensor in held:
                claimed(tensor)
            self.runtime.tiers.ledger.enter(OPTIMIZER, nbytes - self._state_nbytes)
            self._state_nbytes = nbytes

    def close(self) -> None:
        """Drop all states; the model is as if the optimizer had not been."""
        gate, account = self.runtime.gate, self.runtime.account
        gate.wait()
        if self.host is not None:
            self.host.close()
            gate.steppers.remove(self.host)
        if self.delayed is not None:
            gate.delayed = None
        account.clipped.pop(self, None)
        account.stepped.discard(self)
        account.skipped.discard(self)
        self.whole.close()
        for run in self.all_runs:
            run.states.clear()
        others = [run for core in self.cores if core is not self for run in core.all_runs]
        for group in self.indices:
            kept = {name for run in others if run.group is group for name in run.states.columns}
            for name in group.columns.keys() - kept if group.offload.tier is not Tier.DISK else ():  # files do not shrink
                self.runtime.tiers.drop(OPTIMIZER, group.columns.pop(name))
        self.runtime.tiers.ledger.strike(OPTIMIZER, self._state_nbytes)
        self._state_nbytes = 0
        self.inner.state.clear()
        self.runs = []


_NOT_COPIED = {"core", "param_groups", "state", "step"}  # attributes of which outer and inner each keep their own


def plain_options(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the groups' options that are numbers, strings or lists of these, which ranks can send to each other."""
    groups = [
        {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in g.items()} for g in optimizer.param_groups
    ]
    return [{k: v for k, v in group.items() if k != "params" and _is_plain(v)} for group in groups]


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def take_options(optimizer: torch.optim.Optimizer, told: list[Options]) -> None:
    """Set the groups' options to those of another rank, keeping the type that an option has here (tensor, tuple)."""
    for group, options in zip(optimizer.param_groups, told, strict=True):
        for key, value in options.items():
            mine = group.get(key)
            if isinstance(mine, Tensor):
                mine.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(mine, tuple) else value
