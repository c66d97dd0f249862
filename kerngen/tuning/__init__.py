"""The tuner: which configuration of a kernel is fastest at each problem of a workload, and how that is known.

plan            the configurations of a problem, why others are refused, how they rank before any compile
space           a search space's valid points; field_tracing: which fields a refusal reads
objective       what a run is after: a Protocol, and its implementations `Predicted` and `Measured`
step_objective  a third, whose finalists whole steps of the model judge; descent: which to exchange there;
                step_timer, step_worker: how long such a step takes
study           one problem's search, an Optuna study driven with ask and tell
task            one problem of a run, one trial of it
tuner           all problems together, in rounds; every outcome is a row of the tuning database
budget          where the time goes: weights, portions, what is kept for the finals; neighbours: who is near whom
finish          the end of a run: winners, and the cost model's answers where time was short
ledger          what earlier runs know, and what this one adds
worker          the process that holds the GPU
checks          what a compiled kernel must be
report          what came of a run
sampler         Optuna's, that learns what the cost model gets wrong; features of configurations, describe: those of
                whole spaces, made in other processes; surrogate: the Gaussian process
ab              times candidates beside the default, alone or in a step (kerngen bench ab); ab_plan: which ones, of a
                file; ab_rows: what it saw, as rows of the database and as recordings
recorded        what every configuration of a grid took on one board: files for replays and fits
"""
