"""The pure core: `Core.handle(events, now) -> Step(writes, sends, loads, wake_at)`. No asyncio, clock, chance or I/O.

All decisions of the coordinator are made here. The driver gathers events, calls `handle`, commits the step's writes in
one ledger transaction and only then delivers its sends; see `step.py`.

The modules stand in layers, and a module imports from layers below its own only (`[tool.importlinter]` in
pyproject.toml checks that). What a module cannot do itself, because it is for one further up, it notes down in
`State.notes`; `core.py` hands the notes up at the end of the step, one kind after the other:

    core                                            takes events, hands notes up
    child_items | commands | hello | item_commands | results    what clients, operators and workers say
    submit | dispatch | steal | status              items in, attempts out, what is shown
    replay | window | pending_reasons | causes      from the ledger into memory; why items wait, or cannot start
    workers                                         who is alive
    failures                                        try again, or fail for good
    commit                                          acceptance, cursor, what policies decide
    runs                                            opened, paused, ended, forgotten
    logs | policies | row_failures
    attempts | rates                                what is in flight; how fast runs go
    chains | fair_share                             which item next, for whom
    queues                                          pending items in memory
    index                                           which of them are ready, or wait: the candidates for a worker
    capacity                                        what a worker may be given
    items | object_retention | run_limits           the state of items; what is kept
    state                                           the records
    reasons
    step | transitions                              what comes out; the tables of states
    events | views | settings | ranges | limits | progress

A reading order: `events` and `step` (what goes in and out), `transitions` (what can happen to an item, a run, a
worker), `state`, `items`. Then the life of an item: `submit`, `window`, `queues`, `index`, `dispatch`, `attempts`,
`results`, `failures`, `commit`. Then `workers` and `hello` (who is believed), `replay` (a new leader), and the rest.
"""
