"""The benchmarks (`zeroshard bench`): zeroshard beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed, in one run.

    plan.py, workload.py              contenders, model, rounds (frozen dataclasses); batches and optimizer, equal for all
    contenders.py, parallel.py        each library, set up as its documentation says, also to save and load; on a mesh of 8 ranks
    worker.py, worker_group.py        one rank of one contender, asleep until it is asked to step; the team of all its ranks
    race.py                           the interleaved rounds; losses and memory of the contenders compared
    micro.py, cases.py                cases that take turns in one process: host work, host Adam, file engine
    state_formats.py, state_quality.py    optimizer states in fewer bits: bytes, time, losses; curves of losses
    checkpoints.py                    saving and loading
    tables.py                         the form in which every section reports: rows, ratios within a round, goals
    memory.py, overlap.py             resident memory, as the kernel counts it; copies beside kernels, by torch's profiler
    command.py, report.py, pictures.py    the command line; results.json, results.md; the pictures
    predictions.py, gpu_day.py        plans beside runs of two ranks; on GPUs: scripts/gpu_day.sh, the largest models

Words used here: a *contender* is a library with a stage and a precision; its *team* is one process per
rank; a *turn* is a few consecutive steps of one contender; a *round* is one turn of each contender.
"""
