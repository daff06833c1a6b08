"""TRL's names of keys, so that its users can paste a configuration: one table, shown in the documentation.

They stand in `[algorithm.KIND]`, as TRL's arguments stand beside each other. A key that is given under both names is a
fault, and so is one that asks for what is not done here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rollout.config.renamed import Place, Renamed
from rollout.workloads.train.policy_config import as_reward


@dataclass(frozen=True, slots=True)
class Key:
    """What becomes of one of TRL's keys, by its value.

    `place`: our key, below [algorithm.KIND]; with a leading slash, of the whole file. `values`: what values are called
    here. `fine`: values that ask for what is done anyway. `note`: what is done instead, of a key that changes no
    result; it is left out. `instead`: what to do, of a key that is refused.
    """

    place: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    fine: tuple[Any, ...] = ()
    note: str = ""
    instead: str = ""


_OFF: tuple[Any, ...] = (False, "", 0, 0.0, [], {}, "no", "none")
_LOGGED = "every step is written to metrics.jsonl, and shown"
_LOADED = "data is read once, before the first step"
_SAVED = "snapshots hold all of the state"
_WORKERS_LOG = "what libraries say is in the log of the worker"
_UPLOADED = "nothing is uploaded"
_SUMS = "sums are kept, not outputs"
_EXCHANGED = "gradients are exchanged as PyTorch does by default"
_PADDED = "masks say what is padding, whatever the token"
_LENGTHS = "prompt and answer have max_length together: set that, and leave this out"

_BIASED = (
    "the engine's log-probabilities would be of what is left to draw from, and the trainer's of all tokens, so that "
    "every ratio is biased: sample with temperature alone"
)
_SHAPED = "rewards are shaped by functions: write it as one of reward"
_OTHER_LOSS = "it belongs to a loss that is not trained on here"
_ENTROPY = "there is no bonus for entropy"
_SHOWN = "samples.jsonl has every sample"
_BY_LABELS = "workers that draw samples are found by their labels"
_COUNTED = "set minibatch_size; of grpo and ppo, prompts_per_step and num_minibatches too"

SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, 1),
    "top_k": (0, -1),
    "min_p": (0.0, 0),
    "typical_p": (1.0, 1),
    "repetition_penalty": (1.0, 1),
    "presence_penalty": (0.0, 0),
    "frequency_penalty": (0.0, 0),
}
"""Keys by which engines draw from a part of the distribution, with the values that do not."""

_ACCELERATOR = {
    "split_batches": False,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
}
"""TRL's default, as a file without null has it."""

_RATIO = "use_bias_correction_kl"

KEYS: dict[str, Key] = {
    # ---- the model
    "model_name_or_path": Key("base_model.uri"),
    "model_revision": Key("base_model.revision"),
    "chat_template_path": Key("base_model.chat_template"),
    "attn_implementation": Key("attention"),
    "torch_compile": Key("compile"),
    "use_cpu": Key("device", {True: "cpu", False: None}),
    "dtype": Key(fine=("float32", "auto"), note="weights are kept in float32; precision says what is computed in"),
    "torch_dtype": Key(
        fine=("float32", "auto"), note="weights are kept in float32; precision says what is computed in"
    ),
    "trust_remote_code": Key(fine=_OFF, instead="only models that transformers knows itself are trained"),
    "model_init_kwargs": Key(fine=_OFF, instead="use attention, precision and base_model"),
    "load_in_4bit": Key(fine=_OFF, instead="quantised weights are not trained: use lora, or a smaller model"),
    "load_in_8bit": Key(fine=_OFF, instead="quantised weights are not trained: use lora, or a smaller model"),
    "use_cache": Key(note="there is no cache of keys and values in training"),
    "reference_free": Key("reference", {True: "free", False: None}),
    # ---- the data
    "dataset_name": Key("dataset.path"),
    "dataset_train_split": Key("dataset.split"),
    "dataset_config": Key(fine=_OFF, instead="save the one that is meant with Dataset.save_to_disk"),
    "dataset_streaming": Key(fine=_OFF, instead="data is read from files: save it with Dataset.save_to_disk"),
    "dataset_text_field": Key(fine=("text",), instead='call the column "text"'),
    "dataset_num_proc": Key(note=_LOADED),
    "dataset_kwargs": Key(fine=_OFF, instead="leave it out"),
    "dataloader_num_workers": Key(note=_LOADED),
    "dataloader_pin_memory": Key(note=_LOADED),
    "dataloader_prefetch_factor": Key(note=_LOADED),
    "dataloader_persistent_workers": Key(note=_LOADED),
    "dataloader_drop_last": Key(fine=_OFF, instead="the last step of the run may be smaller: use budget.max_steps"),
    "dataloader_multiprocessing_context": Key(note=_LOADED),
    "dataloader_in_order": Key(fine=(True,), note=_LOADED),
    "length_column_name": Key(fine=("length",), note="lengths are counted"),
    "label_names": Key(fine=_OFF, instead="columns have fixed names: see the shapes of rows"),
    "remove_unused_columns": Key(note="columns that nothing needs are not read, and rewards get all"),
    "shuffle_dataset": Key(note="every epoch has an order of its own, by seed"),
    "train_sampling_strategy": Key(fine=("random",), instead="every epoch has an order of its own, by seed"),
    "group_by_length": Key(fine=_OFF, instead='use packing.kind = "best_fit"'),
    "data_seed": Key(instead="seed is that of the order of rows too"),
    "max_seq_length": Key("max_length"),
    "max_prompt_length": Key(instead=_LENGTHS),
    "max_completion_length": Key(instead=_LENGTHS),
    "truncation_mode": Key(fine=("keep_start",), instead='rows are cut off at the end (rows.too_long = "keep")'),
    "eos_token": Key(
        fine=(*_OFF, "<EOS_TOKEN>"), instead="the tokenizer's is used: change it in the tokenizer's files"
    ),
    "pad_token": Key(fine=("<PAD_TOKEN>",), note=_PADDED),
    "padding_value": Key(note=_PADDED),
    "label_pad_token_id": Key(note=_PADDED),
    "pad_to_multiple_of": Key(note="sequences are padded to the longest of their minibatch"),
    "padding_free": Key(fine=_OFF, instead='use packing.kind = "best_fit"'),
    "packing_strategy": Key(fine=("bfd",), instead="rows are packed by best fit, and none is split"),
    "eval_packing": Key(note="the evaluation set is packed as the training set is"),
    # ---- what is learnt
    "completion_only_loss": Key("loss_on.kind", {True: "completion_only", False: "all"}),
    "assistant_only_loss": Key("loss_on.kind", {True: "assistant_only", False: None}),
    "center_rewards_coefficient": Key("centre"),
    "loss_weights": Key(fine=([], [1.0]), instead="one loss is trained on"),
    "rpo_alpha": Key(fine=_OFF, instead="one loss is trained on"),
    "label_smoothing_factor": Key(fine=_OFF, instead="of dpo, use label_smoothing; of sft there is none"),
    "neftune_noise_alpha": Key(fine=_OFF, instead="no noise is added to embeddings: leave it out"),
    "router_aux_loss_coef": Key(fine=_OFF, instead="the balance of experts is not trained: leave it out"),
    "f_divergence_type": Key(fine=("reverse_kl",), instead="the divergence is the reverse KL: leave it out"),
    "f_alpha_divergence_coef": Key(note="the divergence is the reverse KL"),
    "discopop_tau": Key(note=_OTHER_LOSS),
    "ld_alpha": Key(fine=(1.0,), instead="leave it out"),
    "use_weighting": Key(fine=_OFF, instead="leave it out"),
    "sync_ref_model": Key(fine=_OFF, instead="the reference stays as it is: leave it out"),
    "ref_model_mixup_alpha": Key(note="the reference stays as it is"),
    "ref_model_sync_steps": Key(note="the reference stays as it is"),
    "precompute_ref_log_probs": Key(note="the reference is asked at each step"),
    "precompute_ref_batch_size": Key(note="the reference is asked at each step"),
    # ---- steps
    "per_device_train_batch_size": Key("minibatch_size"),
    "gradient_accumulation_steps": Key("gradient_accumulation"),
    "auto_find_batch_size": Key(fine=_OFF, instead="set minibatch_size; --dry-run estimates the memory"),
    "average_tokens_across_devices": Key(fine=(True,), instead="losses are means over all devices' tokens"),
    "num_train_epochs": Key("budget.epochs"),
    "max_steps": Key("budget.max_steps", {-1: None}),
    "learning_rate": Key("optimizer.lr"),
    "weight_decay": Key("optimizer.weight_decay"),
    "adam_beta1": Key("optimizer.betas"),
    "adam_beta2": Key("optimizer.betas"),
    "adam_epsilon": Key("optimizer.eps"),
    "optim": Key("optimizer.kind", {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"}),
    "optim_args": Key(fine=_OFF, instead="use the keys of optimizer"),
    "optim_target_modules": Key(fine=_OFF, instead="use lora.target_modules"),
    "lr_scheduler_type": Key("optimizer.schedule"),
    "lr_scheduler_kwargs": Key("optimizer.min_lr_ratio"),
    "warmup_steps": Key("optimizer.warmup_steps"),
    "warmup_ratio": Key("optimizer.warmup_ratio"),
    "max_grad_norm": Key("optimizer.max_grad_norm"),
    "ignore_data_skip": Key(fine=_OFF, instead="a run that goes on takes the rows that come next: leave it out"),
    # ---- samples and rewards
    **{name: Key(fine=fine, instead=_BIASED) for name, fine in SAMPLING.items()},
    "generation_kwargs": Key(fine=_OFF, instead="use temperature, max_completion_length and stop_token_ids"),
    "chat_template_kwargs": Key(fine=_OFF, instead="give base_model.chat_template, a template that needs none"),
    "cache_implementation": Key(note="the engine keeps keys and values as it does"),
    "use_transformers_paged": Key(note="a group is a batch of its own, whatever else is drawn"),
    "use_transformers_continuous_batching": Key(note="a group is a batch of its own, whatever else is drawn"),
    "transformers_continuous_batching_config": Key(note="a group is a batch of its own, whatever else is drawn"),
    "ds3_gather_for_generation": Key(note="weights are published to the engines as a whole"),
    "cast_lm_head_to_fp32": Key(fine=_OFF, instead="logits are computed in precision, and compared in float32"),
    "num_generations_eval": Key(fine=_OFF, instead="evaluations have num_generations too: leave it out"),
    "generation_batch_size": Key("prompts_per_step"),
    "steps_per_generation": Key("num_minibatches"),
    "use_vllm": Key("/generation.backend", {True: "vllm", False: None}),
    "vllm_mode": Key("/generation.placement", {"colocate": None}),
    "vllm_model_impl": Key(fine=("vllm", "auto"), instead="leave it out: vLLM's own implementation is used"),
    "vllm_enable_sleep_mode": Key(note="memory is given back between drawing and training"),
    "vllm_structured_outputs_regex": Key(fine=_OFF, instead=_BIASED),
    "vllm_server_base_url": Key(note=_BY_LABELS),
    "vllm_server_host": Key(note=_BY_LABELS),
    "vllm_server_port": Key(note=_BY_LABELS),
    "vllm_server_timeout": Key(note=_BY_LABELS),
    "vllm_group_port": Key(note=_BY_LABELS),
    "vllm_gpu_memory_utilization": Key("/generation.engine"),
    "vllm_max_model_length": Key("/generation.engine"),
    "vllm_tensor_parallel_size": Key("/generation.engine"),
    "vllm_importance_sampling_correction": Key("importance_sampling_correction", {True: None, False: "off"}),
    "vllm_importance_sampling_mode": Key("importance_sampling_correction"),
    "vllm_importance_sampling_clip_max": Key("importance_sampling_cap"),
    "vllm_importance_sampling_cap": Key("importance_sampling_cap"),
    "vllm_importance_sampling_clip_min": Key(fine=_OFF, instead="the correction has an upper bound only: leave it out"),
    "reward_funcs": Key("reward"),
    "reward_model_name_or_path": Key("reward"),
    "reward_weights": Key("reward"),
    "multi_objective_aggregation": Key(
        fine=("sum_then_normalize",), instead="rewards are added up, and then made advantages"
    ),
    "max_tool_calling_iterations": Key(fine=_OFF, instead="no tools are called between the tokens of a sample"),
    "log_completions": Key(note=_SHOWN),
    "log_multimodal": Key(note=_SHOWN),
    "log_unique_prompts": Key(note=_SHOWN),
    "num_completions_to_print": Key(note="rollout train samples shows them"),
    "log_completions_hub_repo": Key(fine=_OFF, note=_UPLOADED),
    # ---- what is learnt of samples
    "sapo_temperature_neg": Key(note=_OTHER_LOSS),
    "sapo_temperature_pos": Key(note=_OTHER_LOSS),
    "vespo_k_pos": Key(note=_OTHER_LOSS),
    "vespo_lambda_pos": Key(note=_OTHER_LOSS),
    "vespo_k_neg": Key(note=_OTHER_LOSS),
    "vespo_lambda_neg": Key(note=_OTHER_LOSS),
    "top_entropy_quantile": Key(fine=(1.0, 1), instead="every token of a sample is trained on: leave it out"),
    "entropy_coef": Key(fine=_OFF, instead=_ENTROPY),
    "use_adaptive_entropy": Key(fine=_OFF, instead=_ENTROPY),
    "entropy_coef_min": Key(note=_ENTROPY),
    "entropy_coef_max": Key(note=_ENTROPY),
    "entropy_coef_delta": Key(note=_ENTROPY),
    "entropy_target": Key(note=_ENTROPY),
    "off_policy_mask_threshold": Key(fine=_OFF, instead="use importance_sampling_correction, and lag"),
    _RATIO: Key(fine=_OFF, instead="the divergence is k3 without a ratio: set it to false"),
    # ---- of PPO
    "sft_model_path": Key("base_model.uri"),
    "reward_model_path": Key("reward"),
    "num_ppo_epochs": Key("num_iterations"),
    "num_mini_batches": Key("num_minibatches"),
    "response_length": Key("max_completion_length"),
    "cliprange": Key("epsilon"),
    "kl_estimator": Key(fine=("k1",), instead="the divergence in the reward is k1: leave it out"),
    "stop_token": Key(fine=("eos",), instead="use stop_token_ids"),
    "stop_token_id": Key("stop_token_ids"),
    "missing_eos_penalty": Key(fine=_OFF, instead=_SHAPED),
    "total_episodes": Key(instead="set budget.max_steps: a step has prompts_per_step x num_generations episodes"),
    "num_total_batches": Key(instead="set budget.max_steps"),
    "local_rollout_forward_batch_size": Key(note="minibatch_size samples are evaluated at once"),
    "num_sample_generations": Key(note=_SHOWN),
    "world_size": Key(fine=_OFF, instead="set devices and strategy"),
    "micro_batch_size": Key(fine=_OFF, instead=_COUNTED),
    "local_batch_size": Key(fine=_OFF, instead=_COUNTED),
    "batch_size": Key(fine=_OFF, instead=_COUNTED),
    "local_mini_batch_size": Key(fine=_OFF, instead=_COUNTED),
    "mini_batch_size": Key(fine=_OFF, instead=_COUNTED),
    "exp_name": Key(note="run.name is the run's"),
    "model_adapter_name": Key(fine=_OFF, instead="leave it out: lora has one adapter"),
    "ref_adapter_name": Key(fine=_OFF, instead="name a model with reference"),
    "reward_shaping_enable_length": Key(fine=_OFF, instead=_SHAPED),
    "reward_shaping_enable_repetition": Key(fine=_OFF, instead=_SHAPED),
    "reward_shaping_enable_eos": Key(fine=_OFF, instead=_SHAPED),
    **{
        f"reward_shaping_{name}": Key(note=_SHAPED)
        for name in (
            "length_coef",
            "repetition_coef",
            "repetition_ngram",
            "eos_bonus",
            "eos_missing_penalty",
            "eos_out_of_range_penalty",
            "eos_min_len",
            "eos_max_len",
        )
    },
    # ---- the adapter
    "use_peft": Key("lora"),
    "lora_r": Key("lora.r"),
    "lora_alpha": Key("lora.alpha"),
    "lora_dropout": Key("lora.dropout"),
    "lora_target_modules": Key("lora.target_modules"),
    "lora_task_type": Key(note="the algorithm says it"),
    "lora_modules_to_save": Key(fine=_OFF, instead="name layers in lora.target_modules"),
    "lora_target_parameters": Key(fine=_OFF, instead="name layers in lora.target_modules"),
    "use_rslora": Key(fine=_OFF, instead="set lora.alpha to alpha times the root of r"),
    "use_dora": Key(fine=_OFF, instead="leave it out"),
    # ---- the machine
    "local_rank": Key(note="a worker starts its ranks itself"),
    "accelerator_config": Key(fine=(*_OFF, _ACCELERATOR), instead="use minibatch_size, strategy and devices"),
    "parallelism_config": Key(fine=_OFF, instead="use strategy and devices"),
    "bf16": Key("precision", {True: "bf16", False: "fp32"}),
    "fp16": Key(fine=_OFF, instead='use precision = "bf16": it needs no scaling of the loss'),
    "tf32": Key(fine=_OFF, instead="matrices are multiplied in the precision that is set, so that results repeat"),
    "gradient_checkpointing_kwargs": Key(note="the variant without re-entrance is used"),
    "activation_checkpointing": Key("gradient_checkpointing"),
    "activation_checkpointing_kwargs": Key(note="the variant without re-entrance is used"),
    "activation_offloading": Key(fine=_OFF, instead="use gradient_checkpointing"),
    "use_liger_kernel": Key(fine=_OFF, instead="use compile = true"),
    "liger_kernel_config": Key(fine=_OFF, instead="use compile = true"),
    "torch_empty_cache_steps": Key(note="PyTorch keeps the memory that it has"),
    "torch_compile_backend": Key(fine=_OFF, instead="leave it out: the default is used"),
    "torch_compile_mode": Key(fine=_OFF, instead="leave it out: the default is used"),
    "fsdp": Key(fine=_OFF, instead='set strategy = "fsdp" and devices'),
    "fsdp_config": Key(fine=_OFF, instead='set strategy = "fsdp" and devices'),
    "deepspeed": Key(fine=_OFF, instead='set strategy = "fsdp" and devices'),
    "ddp_find_unused_parameters": Key(note="every weight is used"),
    "ddp_backend": Key(note="nccl on GPUs, gloo on the CPU"),
    "ddp_bucket_cap_mb": Key(note=_EXCHANGED),
    "ddp_broadcast_buffers": Key(note=_EXCHANGED),
    "ddp_static_graph": Key(note=_EXCHANGED),
    "ddp_timeout": Key(fine=(1800,), note=_EXCHANGED),
    "full_determinism": Key(note="training is always deterministic"),
    "disable_tqdm": Key(note="--json gives lines for programs"),
    "debug": Key(fine=_OFF, instead="leave it out"),
    "skip_memory_metrics": Key(fine=(True,), note=_LOGGED),
    "log_level": Key(fine=("passive",), note=_WORKERS_LOG),
    "log_level_replica": Key(fine=("warning",), note=_WORKERS_LOG),
    "log_on_each_node": Key(fine=(True,), note=_WORKERS_LOG),
    # ---- evaluation
    "eval_steps": Key("eval.every_steps"),
    "eval_strategy": Key(
        fine=("steps", *_OFF), instead="set eval_steps; 0 is at the end of each segment (snapshots.every_steps)"
    ),
    "do_eval": Key(note="there is an evaluation where there is an eval_dataset"),
    "do_train": Key(note="that is what this is for"),
    "dataset_test_split": Key("eval_dataset.split"),
    "per_device_eval_batch_size": Key(note="minibatch_size is that of evaluations too"),
    "eval_accumulation_steps": Key(note=_SUMS),
    "eval_delay": Key(fine=_OFF, instead="evaluations begin with the first: leave it out"),
    "eval_on_start": Key(fine=_OFF, instead="the first evaluation is after eval.every_steps: leave it out"),
    "eval_do_concat_batches": Key(fine=(True,), note=_SUMS),
    "eval_use_gather_object": Key(fine=_OFF, note=_SUMS),
    "prediction_loss_only": Key(fine=_OFF, note=_SUMS),
    "include_for_metrics": Key(fine=_OFF, instead="evaluations have the metrics of the algorithm: leave it out"),
    "batch_eval_metrics": Key(fine=_OFF, note=_SUMS),
    "bf16_full_eval": Key(fine=_OFF, instead="evaluations are computed as steps are: set precision"),
    "fp16_full_eval": Key(fine=_OFF, instead="evaluations are computed as steps are: set precision"),
    "do_predict": Key(fine=_OFF, instead="rollout infer batch writes what the model answers"),
    "load_best_model_at_end": Key(fine=_OFF, instead="use eval.patience, and export the snapshot that is best"),
    "metric_for_best_model": Key(
        fine=(
            "loss",
            "eval_loss",
        ),
        instead="evaluations are compared by their loss",
    ),
    "greater_is_better": Key(fine=_OFF, instead="evaluations are compared by their loss"),
    # ---- what is written
    "output_dir": Key("/output.dir"),
    "run_name": Key("/run.name"),
    "save_steps": Key("/snapshots.every_steps"),
    "save_total_limit": Key("/snapshots.keep_last"),
    "save_strategy": Key(fine=("steps",), instead="set save_steps: there is a snapshot after so many steps"),
    "save_only_model": Key(fine=_OFF, instead=f"{_SAVED}: rollout snapshot export writes the model alone"),
    "save_safetensors": Key(note="weights are safetensors"),
    "save_on_each_node": Key(fine=_OFF, note="snapshots are kept by the coordinator"),
    "enable_jit_checkpoint": Key(fine=_OFF, note="a run goes on from its last snapshot"),
    "restore_callback_states_from_checkpoint": Key(fine=_OFF, note=_SAVED),
    "overwrite_output_dir": Key(fine=_OFF, instead="name another output.dir"),
    "resume_from_checkpoint": Key(fine=_OFF, instead="give the same command again, or --resume"),
    "logging_steps": Key(note=_LOGGED),
    "logging_strategy": Key(note=_LOGGED),
    "logging_first_step": Key(note=_LOGGED),
    "logging_dir": Key(note=_LOGGED),
    "logging_nan_inf_filter": Key(fine=(True,), note="losses are written as they are"),
    "project": Key(fine=("huggingface",), note=_LOGGED),
    "trackio_space_id": Key(note=_LOGGED),
    "trackio_bucket_id": Key(note=_LOGGED),
    "trackio_static_space_id": Key(note=_LOGGED),
    "include_num_input_tokens_seen": Key(note="tokens are counted at every step"),
    "report_to": Key(
        fine=(
            "none",
            [],
            ["none"],
        ),
        note=_LOGGED,
    ),
    "push_to_hub": Key(fine=_OFF, instead="rollout snapshot export writes a directory that can be uploaded"),
    "hub_model_id": Key(note=_UPLOADED),
    "hub_strategy": Key(note=_UPLOADED),
    "hub_token": Key(fine=("<HUB_TOKEN>",), note=_UPLOADED),
    "hub_always_push": Key(fine=_OFF, note=_UPLOADED),
    "hub_revision": Key(note=_UPLOADED),
    "hub_private_repo": Key(note=_UPLOADED),
}
"""TRL's name -> what becomes of it. Of names that are ours too, with the same meaning, there is nothing to say."""

_DEVICE_BATCH = "per_device_train_batch_size"
_BATCHES = ("generation_batch_size", "steps_per_generation", "gradient_accumulation_steps", _DEVICE_BATCH)
_UPDATES = frozenset({"max_steps", "save_steps", "eval_steps", "warmup_steps"})
_REWARDS = ("reward_funcs", "reward_model_name_or_path", "reward_model_path", "reward_weights")
_ENGINE = {
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_max_model_length": "max_model_len",
    "vllm_tensor_parallel_size": "tensor_parallel_size",
}
_OURS = frozenset({"packing", "loss_type"})
"""Keys of ours that TRL gives another kind of value."""


def renamed(values: dict[str, Any], keys: Mapping[str, Collection[str]]) -> Renamed:
    """`values` of a configuration file under our names, with where each came from, what is wrong and what to say.

    `keys`: our own, by algorithm.
    """
    result = Renamed(values)
    algorithm = values.get("algorithm")
    tables = cast("dict[str, Any]", algorithm) if isinstance(algorithm, dict) else {}
    for place, table in (((), values), (("algorithm",), tables)):
        for name in KEYS.keys() & table.keys():
            result.remove((*place, name))
            result.faults.append(
                ((*place, name), "is one of TRL's names, which stand in [algorithm.KIND], such as sft")
            )
    generation: Any = values.get("generation")
    for name in SAMPLING.keys() & generation.keys() if isinstance(generation, dict) else ():
        result.remove(("generation", name))
        if not _among(cast("dict[str, Any]", generation)[name], SAMPLING[name]):
            result.faults.append((("generation", name), f"is not done here: {_BIASED}"))
    for kind, own in keys.items():
        table = tables.get(kind)
        if isinstance(table, dict):
            _Table(result, kind, own, cast("dict[str, Any]", table)).translate()
    return result


class _Table:
    """`[algorithm.KIND]` of a file, whose keys go to their places in `result`."""

    def __init__(self, result: Renamed, kind: str, own: Collection[str], given: dict[str, Any]) -> None:
        self._result = result
        self._kind = kind
        self._own = own
        self._given = given
        self._here: Place = ("algorithm", kind)
        self._samples = "prompts_per_step" in own
        """Of an algorithm whose data are samples."""
        self._updates = 1
        """Of the optimiser, in a step, where TRL's steps are updates."""

    def translate(self) -> None:
        if self._samples:
            self._batches()
        for name in list(self._given):
            if self._samples and name in _BATCHES:
                continue
            if name in KEYS and name not in self._own:
                self._key(name, KEYS[name], self._given[name])
            elif name in _OURS:
                self._ours(name, self._given[name])
            elif name not in self._own:
                self._unknown(name)
        pasted = any(name in KEYS and name not in self._own for name in self._given)
        if self._kind == "grpo" and pasted and self._given.get("beta") and _RATIO not in self._given:
            self._result.notes.append(
                f"beta: TRL multiplies the divergence by the ratio unless {_RATIO} = false: here it is k3 alone"
            )

    def _key(self, name: str, key: Key, value: Any) -> None:
        self._result.remove((*self._here, name))
        if _among(value, key.fine):
            return
        if self._updates > 1 and name in _UPDATES and type(value) is int and value > 1:
            shown = key.place.removeprefix("/")
            self._fault(
                name,
                f"counts updates of the optimiser in TRL, of which a step has {self._updates} here (num_iterations x "
                f"num_minibatches): set {shown} = {-(-value // self._updates)}",
            )
        elif special := _SPECIAL.get(name):
            special(self, name, value)
        elif key.place:
            known = isinstance(value, str | bool | int | None) and value in key.values
            if not known or key.values[value] is not None:
                self._put(name, key.place, key.values[value] if known else value)
        elif key.note:
            self._result.notes.append(f"{name} is left out: {key.note}")
        else:
            self._fault(name, f"is not done here: {key.instead}")

    def _ours(self, name: str, value: Any) -> None:
        if name == "packing" and isinstance(value, bool):
            self._result.remove((*self._here, name))
            if value:  # TRL's packing has no length of its own
                self._put(name, "packing.kind", "best_fit")
        elif name == "loss_type" and self._kind == "grpo":
            return
        elif name == "loss_type" and self._kind != "dpo":
            fine = {"sft": ("nll", "chunked_nll"), "kto": ("kto",), "ipo": ("ipo", ["ipo"])}.get(self._kind, ())
            self._result.remove((*self._here, name))
            if not _among(value, fine):
                self._fault(name, f"is not done here: {self._kind} has one loss")
        elif name == "loss_type" and value in ("ipo", ["ipo"]):
            self._result.remove((*self._here, name))
            self._fault(name, 'is an algorithm here: set algorithm.kind = "ipo", and call the section [algorithm.ipo]')

    def _unknown(self, name: str) -> None:
        """Of names that are neither: validation knows only ours."""
        near = difflib.get_close_matches(name, [*self._own, *KEYS], n=1, cutoff=0.75)
        if near and near[0] in KEYS:
            self._result.remove((*self._here, name))
            self._fault(name, f'unknown key; did you mean "{near[0]}"?')

    # ---- keys whose value says more than one thing

    def epochs(self, name: str, value: Any) -> None:
        most = self._given.get("max_steps", -1)
        if type(most) is int and most > 0:
            self._result.notes.append(f"{name} is left out: max_steps = {most:,} is what counts, as in TRL")
        else:
            self._put(name, KEYS[name].place, value)

    def betas(self, name: str, value: Any) -> None:
        other = "adam_beta2" if name == "adam_beta1" else "adam_beta1"
        if name == "adam_beta2" and other in self._given:
            self._result.places[self._place("optimizer.betas.1")] = (*self._here, name)
            return  # told together with the first
        pair = (self._given.get("adam_beta1", 0.9), self._given.get("adam_beta2", 0.999))
        self._put(name, "optimizer.betas", list(pair))

    def warmup(self, name: str, value: Any) -> None:
        share = isinstance(value, float) and 0 <= value < 1  # as transformers reads it
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        self._put(name, "optimizer.warmup_ratio" if share else "optimizer.warmup_steps", value if share else whole)

    def schedule(self, name: str, value: Any) -> None:
        if isinstance(value, dict) and set(cast("dict[str, Any]", value)) == {"min_lr_rate"}:
            self._put(name, "optimizer.min_lr_ratio", cast("dict[str, Any]", value)["min_lr_rate"])
        elif value:
            self._fault(name, "only min_lr_rate is known: use the keys of optimizer")

    def dataset(self, name: str, value: Any) -> None:
        put = self._put(name, "dataset.path", value)
        if put and isinstance(value, str) and not value.endswith((".jsonl", ".json", ".gz", ".zst", ".parquet")):
            self._put(name, "dataset.kind", "dataset_path")

    def test_split(self, name: str, value: Any) -> None:
        if self._given.get("eval_strategy", "no") in _OFF:
            return  # TRL evaluates only when it is told to
        self._put(name, "eval_dataset.split", value)
        source = self._given.get("dataset_name")
        if "eval_dataset" not in self._given and isinstance(source, str):
            self._put(name, "eval_dataset.path", source)
            self._put(name, "eval_dataset.kind", "dataset_path")

    def eval_steps(self, name: str, value: Any) -> None:
        if "eval_dataset" in self._given or self._given.get("eval_strategy", "no") not in _OFF:
            self._put(name, "eval.every_steps", value)

    def peft(self, name: str, value: Any) -> None:
        if value is True:
            self._result.table((*self._here, "lora"))
        elif value is False:
            self._result.remove((*self._here, "lora"))
        else:
            self._fault(name, "must be true or false")

    def checkpointing(self, name: str, value: Any) -> None:
        """Newer transformers write both names, with one value."""
        if self._given.get(KEYS[name].place) != value:
            self._put(name, KEYS[name].place, value)

    def sampling(self, name: str, value: Any) -> None:
        text = KEYS[name].instead
        if self._kind == "kto" and value == "sequential":  # its default: there the partner of a row is by its place
            self._result.notes.append(f"{name} is left out: {text}")
        else:
            self._fault(name, f"is not done here: {text}")

    def adapter(self, name: str, value: Any) -> None:
        if self._given.get("use_peft") is not False:
            self._put(name, KEYS[name].place, value)

    # ---- samples

    def _batches(self) -> None:
        """TRL counts samples of a device and calls of its model; here they follow from prompts and updates."""
        given: dict[str, Any] = {name: self._given[name] for name in _BATCHES if name in self._given}
        for name in given:
            self._result.remove((*self._here, name))
        wrong = [name for name, value in given.items() if type(value) is not int or value < 1]
        for name in wrong:
            self._fault(name, f"must be a whole number of at least 1, not {given[name]!r}")
        if wrong or not given:
            return
        devices, group = (self._whole(name, default) for name, default in (("devices", 1), ("num_generations", 0)))
        group = group or (8 if self._kind == "grpo" else 1)
        batch = given.get(_DEVICE_BATCH, self._whole("minibatch_size", 8))
        if _DEVICE_BATCH in given:
            self._put(_DEVICE_BATCH, "minibatch_size", batch)
        if own := [key for key in ("prompts_per_step", "num_minibatches") if key in self._given]:
            for name in given.keys() - {_DEVICE_BATCH}:
                if given[name] != 1:
                    self._fault(name, f"follows from the other keys, and {own[0]} is given: remove it")
            return
        accumulated, whole = given.get("gradient_accumulation_steps", 1), given.get("generation_batch_size")
        calls = given.get("steps_per_generation", accumulated)
        anchor = next(name for name in _BATCHES if name in given)
        both = whole is not None and "steps_per_generation" in given  # as TRL writes a configuration out
        if both and whole != batch * devices * calls:
            made = batch * devices * calls
            self._fault("steps_per_generation", f"makes {made:,} samples a step, and generation_batch_size {whole:,}")
            return
        if whole is not None:
            calls, left = divmod(whole, batch * devices)
            if left:
                self._fault(anchor, f"is no multiple of the {batch * devices:,} samples of all devices at once")
                return
        samples = batch * devices * calls
        if samples % group:
            self._fault(
                anchor,
                f"makes a step of {samples:,} samples, which num_generations = {group} does not divide: change one of "
                "them, or give prompts_per_step",
            )
            return
        if self._kind == "grpo" and calls % accumulated:
            self._fault(anchor, f"makes {calls} calls a step, no multiple of gradient_accumulation_steps")
            return
        updates = calls // accumulated if self._kind == "grpo" else 1
        self._put(anchor, "prompts_per_step", samples // group)
        if updates > 1:
            self._put(anchor, "num_minibatches", updates)
        if self._kind == "grpo":  # TRL's PPO counts batches
            self._updates = updates * self._whole("num_iterations", 1)

    def _whole(self, name: str, default: int) -> int:
        value = self._given.get(name, default)
        return value if type(value) is int and value > 0 else default

    def rewards(self, name: str, value: Any) -> None:
        """Names, models and weights, which TRL has beside each other, as one list."""
        given = [one for one in _REWARDS if one in self._given]
        named = [one for one in given if one != "reward_weights"]
        if name != given[0]:
            return  # told together with the first
        if named and "reward" in self._given:
            self._fault(named[0], "is TRL's name of reward, which is given too: keep one of them")
            return
        listed: list[Any] = []
        for one in named or ["reward"]:
            inner: Any = self._given.get(one)
            entries = cast("list[Any]", inner if isinstance(inner, list) else [inner] if inner is not None else [])
            listed += entries if one in ("reward_funcs", "reward") else [{"model": entry} for entry in entries]
        if "reward_weights" in given:
            given_weights: Any = self._given["reward_weights"]
            weights = cast("list[Any]", given_weights if isinstance(given_weights, list) else [])
            tables = [as_reward(one) for one in listed]
            if len(weights) != len(listed):
                self._fault("reward_weights", f"must be a list of {len(listed)} numbers, one of each reward")
                return
            if any(not isinstance(one, dict) or "weight" in one for one in tables):
                self._fault("reward_weights", "the rewards have weights of their own: keep one of the two")
                return
            listed = [{**one, "weight": weight} for one, weight in zip(tables, weights, strict=True)]
        self._result.remove((*self._here, "reward"))
        self._put(named[0] if named else "reward", "reward", listed)

    def vllm(self, name: str, value: Any) -> None:
        """Without use_vllm, TRL does not look at them."""
        key = KEYS[name]
        if self._given.get("use_vllm") is not True:
            return
        if name == "vllm_mode" and value == "server":
            self._fault(name, 'set placement = "separate" and require_labels in [generation], and leave this out')
        elif key.place == "/generation.engine":
            self._put(name, f"{key.place}.{_ENGINE[name]}", value)
        elif name == "vllm_importance_sampling_mode" and (
            self._given.get("vllm_importance_sampling_correction") is False
        ):
            return
        elif not (isinstance(value, str | bool) and key.values.get(value, "") is None):
            self._put(name, key.place, key.values.get(value, value) if isinstance(value, str | bool) else value)

    def stop_token(self, name: str, value: Any) -> None:
        self._put(name, "stop_token_ids", [value])

    def bias_correction(self, name: str, value: Any) -> None:
        if self._given.get("beta"):
            self._fault(name, f"is not done here: {KEYS[name].instead}")

    # ---- places

    def _place(self, place: str) -> Place:
        return tuple(place[1:].split(".")) if place.startswith("/") else (*self._here, *place.split("."))

    def _put(self, name: str, place: str, value: Any) -> bool:
        put = self._result.put(self._place(place), value, (*self._here, name))
        if not put:
            self._fault(name, f"is TRL's name of {place.removeprefix('/')}, which is given too: keep one of them")
        return put

    def _fault(self, name: str, text: str) -> None:
        self._result.faults.append(((*self._here, name), text))


_SPECIAL: dict[str, Any] = {
    "adam_beta1": _Table.betas,
    "adam_beta2": _Table.betas,
    "warmup_steps": _Table.warmup,
    "num_train_epochs": _Table.epochs,
    "lr_scheduler_kwargs": _Table.schedule,
    "dataset_name": _Table.dataset,
    "dataset_test_split": _Table.test_split,
    "eval_steps": _Table.eval_steps,
    "use_peft": _Table.peft,
    "train_sampling_strategy": _Table.sampling,
    "activation_checkpointing": _Table.checkpointing,
    "stop_token_id": _Table.stop_token,
    _RATIO: _Table.bias_correction,
    **dict.fromkeys(_REWARDS, _Table.rewards),
    **{name: _Table.vllm for name, key in KEYS.items() if name.startswith("vllm_") and key.place},
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"), _Table.adapter),
}


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Without taking 0 for false, or 1 for true."""
    return any(value == one and type(value) is type(one) for one in values)
