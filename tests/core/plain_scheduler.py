"""The scheduler in plain Python: what `Core.step` must plan, stated again without a thought for speed.

The second opinion on rust/core/src/{scheduler,urgency,prompts,admission,commit,intake,state}.rs. Lists are sorted anew
at every step, nothing is counted that can be looked up, and time does not exist (no deadlines or pace, an unbounded
queue).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plain_blocks import PlainBlocks

LOOKAHEAD = 32


@dataclass(frozen=True)
class Limits:
    """The part of `CoreConfig` that scheduling depends on."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    enable_prefix_caching: bool
    long_prefill_token_threshold: int
    depth: int


SMALL = Limits(
    block_size=4,
    num_blocks=17,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=64,
    policy="fcfs",
    enable_prefix_caching=True,
    long_prefill_token_threshold=0,
    depth=1,
)


@dataclass(frozen=True)
class Request:
    request_id: int
    prompt: tuple[int, ...]
    n: int = 1
    max_tokens: int = 1
    min_tokens: int = 0
    stop: tuple[int, ...] = ()
    priority: int = 0
    salt: bytes = b""


@dataclass(eq=False)
class Seq:
    request: Request
    index: int
    key: tuple[int, int, int]
    state: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    committed: int = 0
    published: int = 0
    pending: int = 0
    in_flight: int = 0
    waits_for: Seq | None = None
    started_in: int = 0
    before_step: int = 0

    @property
    def name(self) -> tuple[int, int]:
        return self.request.request_id, self.index

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(frozen=True)
class Row:
    seq: Seq
    start: int
    length: int
    sampled: bool


class PlainScheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = PlainBlocks(limits.num_blocks, limits.block_size, limits.enable_prefix_caching)
        self.seqs: list[Seq] = []
        self.flights: list[list[Row]] = []
        self.num_arrivals = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.blocked: tuple[tuple[int, int, int], int] | None = None
        self.num_copies = 0
        self.num_hit_tokens = 0
        self.started: set[int] = set()

    # --- looking things up

    def in_state(self, state: str) -> list[Seq]:
        return sorted((s for s in self.seqs if s.state == state), key=lambda s: s.key)

    def max_output(self, request: Request) -> int:
        room = min(self.limits.max_model_len, (self.limits.num_blocks - 1) * self.limits.block_size + 1)
        return min(request.max_tokens, room - len(request.prompt))

    def remaining(self, seq: Seq) -> int:
        if seq.num_output + seq.pending >= self.max_output(seq.request):
            return 0
        return len(seq.tokens) + seq.pending - seq.computed

    # --- requests come and go

    def fits(self, request: Request) -> bool:
        length = len(request.prompt)
        positions = (self.limits.num_blocks - 1) * self.limits.block_size
        return 0 < length < self.limits.max_model_len and length <= positions

    def add(self, request: Request) -> None:
        if not self.fits(request):
            return
        priority = request.priority if self.limits.policy == "priority" else 0
        first: Seq | None = None
        for index in range(request.n):
            key = (priority, self.num_arrivals, index)
            state = "parked" if first else "waiting"
            seq = Seq(request, index, key, state, list(request.prompt), waits_for=first)
            first = first or seq
            self.seqs.append(seq)
        self.num_arrivals += 1

    def abort(self, request_id: int, index: int | None) -> None:
        chosen = [s for s in self.seqs if s.request.request_id == request_id and s.state != "ending"]
        for seq in sorted(chosen, key=lambda s: -s.index):
            if index in (None, seq.index):
                self.end(seq)

    def end(self, seq: Seq) -> None:
        self.unpark(seq)
        if seq.state == "running" and seq.in_flight:
            seq.state = "ending"
            return
        self.blocks.release(seq.blocks)
        self.seqs.remove(seq)

    def unpark(self, leader: Seq) -> None:
        for seq in self.seqs:
            if seq.state == "parked" and seq.waits_for is leader:
                seq.state = "waiting"

    # --- a step

    def step(self, sampled: list[int] | None, aborts: list[tuple[int, int | None]], adds: list[Request]) -> list[Row]:
        """Commit the oldest step (its tokens), take the messages in, plan. Rows in the order of the arena."""
        if sampled is not None:
            self.commit(sampled)
        for request in adds:
            self.add(request)
        for request_id, index in aborts:
            self.abort(request_id, index)
        rows = self.plan()
        if rows:
            self.num_steps += 1
            self.flights.append(rows)
        return rows

    def commit(self, sampled: list[int]) -> None:
        for row, token in zip(self.flights.pop(0), [*sampled, *[None] * len(self.seqs)], strict=False):
            seq = row.seq
            seq.in_flight -= 1
            if seq.state == "ending":
                if seq.in_flight == 0:
                    self.blocks.release(seq.blocks)
                    self.seqs.remove(seq)
                continue
            seq.committed = row.start + row.length
            ended = False
            if row.sampled:
                assert token is not None
                seq.pending -= 1
                seq.tokens.append(token)
                stops = token in seq.request.stop and seq.num_output >= seq.request.min_tokens
                ended = stops or seq.num_output == self.max_output(seq.request)
            self.publish(seq)
            if ended:
                self.end(seq)

    def publish(self, seq: Seq) -> None:
        """Later plans find what is computed, or is planned of the prompt: steps run in the order of their plans."""
        known = max(min(seq.computed, len(seq.request.prompt)), seq.committed) // self.limits.block_size
        for index in range(seq.published, known):
            self.blocks.publish(seq.request.salt, seq.tokens, index, seq.blocks[index])
        seq.published = max(seq.published, known)

    def plan(self) -> list[Row]:
        self.budget = self.limits.max_num_batched_tokens
        self.rows: list[Row] = []
        order = self.make_room()
        short, prefills = self.plan_decodes(order)
        self.open = not short
        self.plan_prompts(prefills)
        for row in self.rows:
            if row.start + row.length >= len(row.seq.request.prompt):
                self.unpark(row.seq)
        decodes = [r for r in self.rows if r.sampled and r.length == 1]
        prompts = [r for r in self.rows if r.sampled and r.length > 1] + [r for r in self.rows if not r.sampled]
        for row in prompts:
            self.publish(row.seq)
        return decodes + prompts

    # --- the urgent push the less urgent out

    def make_room(self) -> list[Seq]:
        """Running sequences that may have rows; others are pushed out once nothing of them is in flight."""
        order = self.in_state("running")
        slots, free, budget = self.num_slots - len(order), len(self.blocks.free), self.limits.max_num_batched_tokens
        victims: list[Seq] = []
        for seq in self.in_state("waiting"):
            first = next((s for s in order if self.remaining(s) > 1), None)
            soon = first is None or seq.key < first.key or len(seq.tokens) < self.remaining(first)
            if budget <= 0 or not order or order[-1].key[0] <= seq.key[0] or not soon:
                break
            needed = self.demand(seq)[2]
            chosen = list[Seq]()
            room = free
            less_urgent = [s for s in order if s.key[0] > seq.key[0]]
            while (slots + len(chosen) == 0 or room < needed) and less_urgent:
                chosen.append(less_urgent.pop())
                room = free + self.freed_by(victims + chosen) - self.freed_by(victims)
            if slots + len(chosen) == 0 or room < needed:
                break
            order = order[: len(order) - len(chosen)]
            victims += chosen
            slots += len(chosen) - 1
            free = room - needed
            budget -= len(seq.tokens)
        for victim in victims:
            if not victim.in_flight:
                self.preempt(victim)
        return order

    def freed_by(self, seqs: list[Seq]) -> int:
        """Blocks that nobody holds any more when these are gone."""
        given = [block for seq in seqs for block in seq.blocks]
        return sum(given.count(block) == self.blocks.uses[block] for block in set(given))

    @property
    def num_slots(self) -> int:
        return min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    # --- prompts

    def plan_prompts(self, prefills: list[Seq]) -> None:
        """Half of what the decodes leave to the shortest, the other half and the rest in turn."""
        waiting = self.in_state("waiting")
        if waiting and (not prefills or waiting[0].key < prefills[0].key) and self.admit(waiting[0]):
            prefills = [waiting[0], *prefills]
        if not prefills:
            return
        first, done = prefills[0], set[Seq]()
        spare = self.budget // 2
        if self.remaining(first) > self.budget - spare:
            others = prefills[1:] + (self.in_state("waiting")[:LOOKAHEAD] if self.may_admit() else [])
            others = [s for s in others if s.key[0] == first.key[0] and self.remaining(s) < self.remaining(first)]
            for seq in sorted(others, key=lambda s: (self.remaining(s), s.key)):
                if spare and (seq.state == "running" or self.admit(seq)):
                    spare -= self.plan_chunk(seq, spare)
                    done.add(seq)
        self.plan_chunk(first)
        for_later = [s for s in prefills[1:] if s not in done]
        while self.budget:
            waiting = self.in_state("waiting")
            if waiting and (not for_later or waiting[0].key < for_later[0].key) and self.admit(waiting[0]):
                self.plan_chunk(waiting[0])
            elif for_later:
                self.plan_chunk(for_later.pop(0))
            else:
                return

    # --- decodes

    def plan_decodes(self, order: list[Seq]) -> tuple[bool, list[Seq]]:
        """One token for those that need one. Whether blocks were short, and who needs more tokens."""
        prefills: list[Seq] = []
        promised = 0
        short = False
        while order:
            seq = order.pop(0)
            if self.remaining(seq) > 1:
                prefills.append(seq)
                continue
            if self.remaining(seq) == 0:
                continue
            skip = False
            while seq.computed == len(seq.blocks) * self.limits.block_size and not self.blocks.free and not skip:
                short = True
                if promised:
                    promised -= 1
                    skip = True
                    continue
                victim = order.pop() if order else seq
                skip = victim is seq
                if victim.in_flight:
                    promised += len(victim.blocks) - 1
                    skip = True
                else:
                    self.preempt(victim)
            if skip:
                continue
            if seq.computed == len(seq.blocks) * self.limits.block_size:
                seq.blocks.append(self.blocks.take())
            self.add_row(seq, 1)
        return short, prefills

    def preempt(self, seq: Seq) -> None:
        self.blocks.release(seq.blocks)
        seq.blocks, seq.computed, seq.committed, seq.published, seq.state = [], 0, 0, 0, "waiting"
        self.num_preemptions += 1

    def plan_chunk(self, seq: Seq, most: int = 1 << 30) -> int:
        length = min(self.remaining(seq), self.budget, most)
        if self.limits.long_prefill_token_threshold and any(r.sampled and r.length == 1 for r in self.rows):
            length = min(length, self.limits.long_prefill_token_threshold)
        if length:
            self.add_row(seq, length)
        return length

    def add_row(self, seq: Seq, length: int) -> None:
        sampled = seq.computed + length == len(seq.tokens) + seq.pending
        self.rows.append(Row(seq, seq.computed, length, sampled))
        seq.before_step = seq.computed
        seq.computed += length
        seq.in_flight += 1
        seq.pending += sampled
        self.budget -= length

    # --- newcomers

    def may_admit(self) -> bool:
        return self.open and len(self.in_state("running")) + len(self.in_state("ending")) < self.num_slots

    def admit(self, seq: Seq) -> bool:
        """Start it. The first that does not fit closes the door for the rest of the step."""
        if not self.may_admit():
            return False
        free = len(self.blocks.free)
        if self.in_state("running") and self.blocked and self.blocked[0] == seq.key and free < self.blocked[1]:
            self.open = False
            return False
        self.blocked = None
        shared, missing, needed, computed, cached = self.demand(seq)
        if needed > free:
            self.blocked = (seq.key, needed)
            self.open = False
            return False
        if seq.request.request_id not in self.started:
            self.started.add(seq.request.request_id)
            self.num_hit_tokens += cached
        self.num_copies += computed % self.limits.block_size > 0
        self.blocks.share(shared)
        seq.blocks = shared + [self.blocks.take() for _ in range(missing)]
        seq.state, seq.computed, seq.started_in = "running", computed, self.num_steps + 1
        # Published again from the first block that no cache gave (a sibling's blocks may be unpublished).
        seq.committed = seq.published = 0
        return True

    def demand(self, seq: Seq) -> tuple[list[int], int, int, int, int]:
        """Blocks to share, number of new ones, of those that must be free; tokens that exist, those from the cache."""
        size = self.limits.block_size
        shared = self.blocks.find(seq.request.salt, seq.tokens)
        computed = cached = len(shared) * size
        sibling = self.sibling(seq)
        if sibling and len(seq.request.prompt) - 1 > computed:
            computed = len(seq.request.prompt) - 1
            shared = sibling.blocks[: computed // size]
        missing = -(-len(seq.tokens) // size) - len(shared)
        reserve = -(-self.limits.num_blocks // 100) if self.in_state("running") else 0
        needed = missing + reserve + sum(block in self.blocks.free for block in shared)
        return shared, missing, needed, computed, cached

    def sibling(self, seq: Seq) -> Seq | None:
        """Somebody of the same request who computed the prompt before this step."""
        in_step = {row.seq for row in self.rows}
        for other in sorted(self.seqs, key=lambda s: s.index):
            before = other.before_step if other in in_step else other.computed
            if (
                other.request is seq.request
                and other.state == "running"
                and other.started_in <= self.num_steps
                and before >= len(seq.request.prompt) - 1
            ):
                return other
        return None
