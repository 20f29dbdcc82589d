"""Names, units and labels of the series that each rank exports and the operator reads.

Every series carries the identity labels, so that a query by ``job_uid`` finds them whatever the scrape configuration
renames. Counters are read raw, and the reader takes differences: ``rate()`` loses a label set that exists for a few
steps only. Missing data is missing, never zero: a gauge without a value yet is not exported.
"""

from __future__ import annotations

from typing import Final

# Identity, on every series.
LABEL_JOB_UID: Final = "job_uid"
LABEL_WORKER: Final = "worker"
LABEL_WORKER_UID: Final = "worker_uid"
LABEL_LOCAL_RANK: Final = "local_rank"
IDENTITY_LABELS: Final = (LABEL_JOB_UID, LABEL_WORKER, LABEL_WORKER_UID, LABEL_LOCAL_RANK)

# Shape of a step. A rank keeps at most MAX_LIVE_SHAPES shapes and drops the oldest first.
LABEL_SHARE: Final = "share"
"""Samples that this rank processed in the step."""
LABEL_MICRO_BATCH: Final = "micro_batch"
"""Largest micro-batch of the step, in samples."""
SHAPE_LABELS: Final = (LABEL_SHARE, LABEL_MICRO_BATCH)
MAX_LIVE_SHAPES: Final = 16

LABEL_PHASE: Final = "phase"
PHASE_LOAD: Final = "load"
PHASE_FORWARD: Final = "forward"
PHASE_BACKWARD: Final = "backward"
"""Own backward computation, without waiting for communication."""
PHASE_SYNC: Final = "sync"
"""Exposed synchronisation, from the end of own backward to the last reduced bucket; includes waiting for others."""
PHASE_UPDATE: Final = "update"
PHASE_COMPUTE: Final = "compute"
"""load + forward + backward + update of one step: its own sum of squares, because phases of one step are correlated."""
PHASE_STEP: Final = "step"
"""Commit to commit: the step as the user experiences it."""
PHASES: Final = (
    PHASE_LOAD,
    PHASE_FORWARD,
    PHASE_BACKWARD,
    PHASE_SYNC,
    PHASE_UPDATE,
    PHASE_COMPUTE,
    PHASE_STEP,
)

# Counters with identity + shape labels.
STEPS: Final = "heterotrain_steps_total"
SAMPLES: Final = "heterotrain_samples_total"
PHASE_SECONDS: Final = "heterotrain_phase_seconds_total"
PHASE_SECONDS_SQUARED: Final = "heterotrain_phase_seconds_squared_total"
FIRST_BUCKET_FRACTION: Final = "heterotrain_first_bucket_fraction_total"
"""Sum over steps of gamma: the fraction of the last micro-batch's backward done when the first bucket was ready."""
FIRST_BUCKET_FRACTION_SQUARED: Final = "heterotrain_first_bucket_fraction_squared_total"

# Counters with identity labels only; the same on every rank, because they are minima over ranks per step.
BUCKET_STEPS: Final = "heterotrain_bucket_steps_total"
"""Steps for which bucket times are known (one step late): one in ``MEASUREMENT_INTERVAL``."""
OVERLAPPED_SECONDS: Final = "heterotrain_overlapped_bucket_seconds_total"
"""T_o: transfer seconds of all buckets but the last, minimum over ranks per bucket, summed over steps."""
LAST_BUCKET_SECONDS: Final = "heterotrain_last_bucket_seconds_total"
"""T_u: transfer seconds of the last bucket, minimum over ranks, summed over steps."""
PAUSE_SECONDS: Final = "heterotrain_pause_seconds_total"
"""Seconds from the last committed step to the next one around a membership change; label ``cause``."""
MEMBERSHIP_CHANGES: Final = "heterotrain_membership_changes_total"
"""Label ``cause``: join, leave, loss."""
LABEL_CAUSE: Final = "cause"
CAUSE_JOIN: Final = "join"
CAUSE_LEAVE: Final = "leave"
CAUSE_LOSS: Final = "loss"
REPEATED_STEPS: Final = "heterotrain_repeated_steps_total"
SKIPPED_STEPS: Final = "heterotrain_skipped_steps_total"
"""Committed steps that did not change the weights, because their loss or gradient was not finite."""
NON_FINITE_STEPS: Final = "heterotrain_non_finite_steps_total"
"""Steps whose loss or gradient was not finite, skipped, applied or failed; without overflows that fp16's loss scale
corrects. The same on every rank."""
NON_FINITE_STEP: Final = "heterotrain_non_finite_step"
"""Gauge: number of the newest step whose loss or gradient was not finite; absent while there was none."""
LAST_FINITE_LOSS: Final = "heterotrain_last_finite_loss"
"""Gauge: the newest finite mean loss before that step; absent with it."""
DIVERGENCES: Final = "heterotrain_divergences_total"
"""Comparisons in which the ranks' training states differed; the same on every rank."""
OUT_OF_MEMORY: Final = "heterotrain_out_of_memory_total"
REFUSED_CONNECTIONS: Final = "heterotrain_refused_connections_total"
"""Connections to this rank whose other side did not prove that it belongs to the job."""
GRADIENT_BYTES: Final = "heterotrain_gradient_bytes_total"
"""Bytes that this rank has handed to sums with other ranks in committed steps: gradients as sent, and forward state."""
CHECKPOINT_FAILURES: Final = "heterotrain_checkpoint_failures_total"
TELEMETRY_SECONDS: Final = "heterotrain_telemetry_seconds_total"
"""Seconds of the training thread that telemetry took, by its own clock; over the steps' seconds, its relative cost."""

# Gauges with identity labels.
PLAN_SCHEMA: Final = "heterotrain_plan_schema"
"""Newest schema of plans that the image reads."""
WAITING_SECONDS: Final = "heterotrain_waiting_seconds"
"""Seconds for which the rank has waited for others in one exchange up to now; 0 while it runs code of its own, absent
while it has no formation. The rank that everyone waits for is the one that does not wait."""
READY: Final = "heterotrain_ready"
PLAN_GENERATION: Final = "heterotrain_plan_generation"
PLAN_REVISION: Final = "heterotrain_plan_revision"
"""Revision whose shares are in force (not merely seen)."""
FORMATION: Final = "heterotrain_formation"
WORLD_SIZE: Final = "heterotrain_world_size"
EPOCH: Final = "heterotrain_epoch"
"""Completed epochs, which is the index of the epoch in progress, from 0."""
STEP: Final = "heterotrain_step"
"""Committed steps since the job began."""
SAMPLES_COMMITTED: Final = "heterotrain_committed_samples"
"""Samples of the global batch committed since the job began; the same on every rank."""
EPOCH_SAMPLES: Final = "heterotrain_epoch_samples"
"""Samples in one epoch."""
CURSOR: Final = "heterotrain_cursor_samples"
EPOCH_STEP: Final = "heterotrain_epoch_step"
"""Committed steps of the epoch: boundaries every so many steps count them."""
GLOBAL_BATCH: Final = "heterotrain_global_batch_samples"
LEARNING_RATE_SCALE: Final = "heterotrain_learning_rate_scale"
"""Factor on the user's learning rate in the last committed step; the same on every rank."""
LOSS_SCALE: Final = "heterotrain_loss_scale"
"""Factor on the loss in fp16; absent in other formats."""
LOSS: Final = "heterotrain_loss"
GRADIENT_SQUARED: Final = "heterotrain_gradient_squared"
"""Smoothed unbiased estimate of |G|^2."""
GRADIENT_VARIANCE: Final = "heterotrain_gradient_variance"
"""Smoothed unbiased estimate of tr(Sigma), per sample."""
NOISE_SCALE: Final = "heterotrain_noise_scale_samples"
MEASUREMENT_INTERVAL: Final = "heterotrain_measurement_interval_steps"
"""In every how many steps gradients and buckets are measured, so that telemetry keeps to its part of the time."""
PEAK_MEMORY: Final = "heterotrain_peak_memory_bytes"
"""Shape labels too: peak memory of steps of this shape."""
DEVICE_MEMORY: Final = "heterotrain_device_memory_bytes"
"""Memory of the rank's accelerator; absent without one."""
GPU_UTILIZATION: Final = "heterotrain_gpu_utilization_ratio"
"""Part of the last ten seconds in which the rank's GPU ran a kernel of any process, by NVIDIA's driver (NVML). This and
the other GPU gauges are absent without an NVIDIA GPU, and this one also for a part of a divided GPU (MIG)."""
GPU_MEMORY_USED: Final = "heterotrain_gpu_memory_used_bytes"
"""Memory of the rank's GPU that all processes use, by the driver."""
GPU_MEMORY_TOTAL: Final = "heterotrain_gpu_memory_total_bytes"
"""Memory of the rank's GPU, by the driver."""
GPU_POWER: Final = "heterotrain_gpu_power_watts"
"""Power that the rank's GPU draws, by the driver."""
GPU_TEMPERATURE: Final = "heterotrain_gpu_temperature_celsius"
"""Temperature of the rank's GPU, by the driver."""
MICRO_BATCH_CAP: Final = "heterotrain_micro_batch_cap_samples"
"""Set by the script, or learned from an out-of-memory; absent without either."""
CHECKPOINTED_UNITS: Final = "heterotrain_checkpointed_units"
"""1 when units of the model compute their activations again because memory ran out; absent otherwise."""
CHECKPOINT_STEP: Final = "heterotrain_checkpoint_step"
CHECKPOINT_TIME: Final = "heterotrain_checkpoint_timestamp_seconds"
RESUMED_STEP: Final = "heterotrain_resumed_step"
"""Committed steps of the checkpoint that another job wrote and training continued from; absent otherwise."""
CHECKPOINT_PAUSE: Final = "heterotrain_checkpoint_pause_seconds"
CHECKPOINT_DURATION: Final = "heterotrain_checkpoint_duration_seconds"
USER_METRIC: Final = "heterotrain_user_metric"
"""What the script reports with ``job.report(name=value)``; label ``name``."""
LABEL_NAME: Final = "name"

# What a worker has checked before it trained. The checks of the machine are of local rank 0.
PREFLIGHT_PASSED: Final = "heterotrain_preflight_passed_checks"
"""Number of checks before training that found nothing; absent until all have ended."""
PREFLIGHT_PROBLEM: Final = "heterotrain_preflight_problem"
"""1 for a check before training that found a limit, 2 for one that failed; labels ``check`` and ``message``."""
PREFLIGHT_WARNING: Final = 1.0
PREFLIGHT_FAILURE: Final = 2.0
LABEL_CHECK: Final = "check"
LABEL_MESSAGE: Final = "message"
"""One sentence for people, cut to ``MOST_MESSAGE`` characters."""
MOST_CHECK: Final = 40
MOST_MESSAGE: Final = 240
MOST_PREFLIGHT_PROBLEMS: Final = 16

# Gauges of a rank that has profiled the model's units, for the planner of layouts. Identity labels, and those named.
UNITS: Final = "heterotrain_units"
"""Number of the model's units."""
UNIT_SECONDS: Final = "heterotrain_unit_seconds"
"""Seconds of one pass of a micro-batch through a unit on this device; labels ``unit``, ``samples``,
and ``phase``, which is forward or backward."""
UNIT_BYTES: Final = "heterotrain_unit_bytes"
"""Labels ``unit``, ``unit_name`` and ``what``: bytes of its parameters; activations and boundary for each sample."""
STATE_RATIO: Final = "heterotrain_training_state_ratio"
"""Bytes of parameters, gradients and optimizer state for each byte of parameters; absent where it is not known."""
UPDATE_SECONDS_PER_BYTE: Final = "heterotrain_update_seconds_per_parameter_byte"
"""Seconds of the optimizers for each byte of parameters that a rank holds, once a step; absent where not known."""
CAN_SHARD: Final = "heterotrain_can_shard"
"""1 if this rank can hold parts of units in a sharded member of several workers: its optimizers are elementwise."""
USABLE_MEMORY: Final = "heterotrain_usable_memory_bytes"
"""Memory of the device that training state and activations may take; less than ``DEVICE_MEMORY``, and also without an
accelerator."""
UNIT_PROFILE_COMPLETE: Final = "heterotrain_unit_profile_complete"
"""1 once the series above hold the whole profile."""
LINK_BANDWIDTH: Final = "heterotrain_link_bytes_per_second"
"""Label ``peer_pool``: bytes per second that arrive from a rank of that pool on another worker, in the same member, by
the fastest of the newest messages of steps; absent before a message of 64 KiB has arrived."""
LINK_LATENCY: Final = "heterotrain_link_latency_seconds"
"""Label ``peer_pool``: seconds of a small message from such a rank, by the fastest of the newest ones."""
LABEL_PEER_POOL: Final = "peer_pool"
MOST_LINKS: Final = 32
"""Pools to which a rank exports a link."""
LABEL_UNIT: Final = "unit"
"""Index of the unit, in the order of computation, from 0."""
LABEL_UNIT_NAME: Final = "unit_name"
"""Where the unit is in the script's model, for people, such as ``blocks.3``; cut to ``MOST_UNIT_NAME`` characters."""
MOST_UNIT_NAME: Final = 40
LABEL_SAMPLES: Final = "samples"
"""Samples of the micro-batch."""
LABEL_WHAT: Final = "what"
WHAT_PARAMETERS: Final = "parameters"
WHAT_ACTIVATIONS: Final = "activations"
WHAT_BOUNDARY: Final = "boundary"
WHATS: Final = (WHAT_PARAMETERS, WHAT_ACTIVATIONS, WHAT_BOUNDARY)
MAX_PROFILED_UNITS: Final = 512
"""Units of an exported profile; with ``MAX_PROFILED_SIZES`` sizes of micro-batches this bounds a rank's series."""
MAX_PROFILED_SIZES: Final = 3
