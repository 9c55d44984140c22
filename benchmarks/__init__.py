"""The benchmarks (`zeroshard bench`): zeroshard beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed, in one run.

The package reads from top to bottom:

    plan.py                   settings of a run: contenders, model, rounds (frozen dataclasses)
    workload.py               the model, its optimizer and the batches, equal for every contender
    contenders.py             each library, set up as its documentation says, also to save and load
    memory.py                 resident memory of a process, as the kernel counts it
    overlap.py                share of copies that overlaps with computation, by CUDA events
    worker.py                 one rank of one contender: a process that sleeps until the controller asks it to step
    worker_group.py           the controller's side of the workers: the team of all ranks of one contender
    race.py                   the interleaved rounds
    micro_benchmark.py        turns of contenders in one process, and a fresh process for a function
    statistics.py, tables.py  medians, ratios per round, bounds; goals and verdicts, tables as cells
    host_overhead.py, cpu_adam.py, codecs.py, disk.py    micro-benchmarks in one process
    state_formats.py, state_quality.py    optimizer states in fewer bits: bytes, time, losses; curves of losses
    checkpoints.py, gpu.py    saving and loading; one GPU: speed on each tier, and the largest models
    network.py, parallel.py   a slow link between two nodes (nodes.py); a mesh of 8 ranks
    report.py, pictures.py    the columns of each table, the goals; results.json, results.md; the pictures
    command.py                the command line
    larger_than_memory.py     a proof, not a comparison: training beyond memory, below an enforced limit

Words used here: a *contender* is a library with a stage and a precision; its *team* is one process per
rank; a *turn* is a few consecutive steps of one contender; a *round* is one turn of each contender.
"""
