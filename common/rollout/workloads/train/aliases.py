"""TRL's names of keys, so that its users can paste a configuration. The documentation shows the table.

They belong in `[algorithm.KIND]`, where all of TRL's arguments stand side by side. A key given under both names is a
fault, and so is a key that asks for something unsupported.
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
    """How one of TRL's keys is treated, depending on its value.

    `place` is our key below [algorithm.KIND], or of the whole file if it begins with a slash. `values` translates
    values. `fine` are values that ask for what happens anyway. `note` explains a key that changes no result and is left
    out. `instead` is the remedy for a key that is refused.
    """

    place: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    fine: tuple[Any, ...] = ()
    note: str = ""
    instead: str = ""


_OFF: tuple[Any, ...] = (False, "", 0, 0.0, [], {}, "no", "none")

_BIASED = (
    "the engine's log-probabilities would be of what is left to draw from, and the trainer's of all tokens, so that "
    "every ratio is biased: use temperature alone"
)

SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, 1),
    "top_k": (0, -1),
    "min_p": (0.0, 0),
    "typical_p": (1.0, 1),
    "repetition_penalty": (1.0, 1),
    "presence_penalty": (0.0, 0),
    "frequency_penalty": (0.0, 0),
}
"""Keys that restrict sampling to a part of the distribution, with the values that do not."""

_ACCELERATOR = {
    "split_batches": False,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
}
"""TRL's defaults, for a file format without null."""

_RATIO = "use_bias_correction_kl"

LEFT_OUT = {
    "weights are kept in float32; precision says what is computed in": "dtype torch_dtype",
    "there is no cache of keys and values in training": "use_cache",
    "data is read once, before the first step": (
        "dataset_num_proc dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
        "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order"
    ),
    "lengths are counted": "length_column_name",
    "columns that nothing needs are not read, and rewards get all": "remove_unused_columns",
    "every epoch has an order of its own, by seed": "shuffle_dataset",
    "masks say what is padding, whatever the token": "pad_token padding_value label_pad_token_id",
    "sequences are padded to the longest of their minibatch": "pad_to_multiple_of",
    "the evaluation set is packed as the training set is": "eval_packing",
    "the divergence is the reverse KL": "f_alpha_divergence_coef",
    "it belongs to a loss that is not trained on here": (
        "discopop_tau sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg "
        "vespo_lambda_neg"
    ),
    "the reference stays as it is": "ref_model_mixup_alpha ref_model_sync_steps",
    "the reference is asked at each step": "precompute_ref_log_probs precompute_ref_batch_size",
    "the engine keeps keys and values as it does": "cache_implementation",
    "a group is a batch of its own, whatever else is drawn": (
        "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config"
    ),
    "weights are published to the engines as a whole": "ds3_gather_for_generation",
    "memory is given back between drawing and training": "vllm_enable_sleep_mode",
    "workers that draw samples are found by their labels": (
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port"
    ),
    "samples.jsonl has every sample": "log_completions log_multimodal log_unique_prompts num_sample_generations",
    "rollout train samples shows them": "num_completions_to_print",
    "nothing is uploaded": (
        "log_completions_hub_repo hub_model_id hub_strategy hub_token hub_always_push hub_revision hub_private_repo"
    ),
    "there is no bonus for entropy": "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    "minibatch_size samples are evaluated at once": "local_rollout_forward_batch_size",
    "run.name is the run's": "exp_name",
    "rewards are shaped by functions: use a function of reward": (
        "reward_shaping_length_coef reward_shaping_repetition_coef reward_shaping_repetition_ngram "
        "reward_shaping_eos_bonus reward_shaping_eos_missing_penalty reward_shaping_eos_out_of_range_penalty "
        "reward_shaping_eos_min_len reward_shaping_eos_max_len"
    ),
    "the algorithm says it": "lora_task_type",
    "a worker starts its ranks itself": "local_rank",
    "the variant without re-entrance is used": "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
    "PyTorch keeps the memory that it has": "torch_empty_cache_steps",
    "every weight is used": "ddp_find_unused_parameters",
    "nccl on GPUs, gloo on the CPU": "ddp_backend",
    "gradients are exchanged as PyTorch does by default": (
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_timeout"
    ),
    "training is always deterministic": "full_determinism",
    "--json gives lines for programs": "disable_tqdm",
    "every step is written to metrics.jsonl, and shown": (
        "skip_memory_metrics logging_steps logging_strategy logging_first_step logging_dir project trackio_space_id "
        "trackio_bucket_id trackio_static_space_id report_to"
    ),
    "what libraries say is in the log of the worker": "log_level log_level_replica log_on_each_node",
    "there is an evaluation where there is an eval_dataset": "do_eval",
    "that is what this is for": "do_train",
    "minibatch_size is that of evaluations too": "per_device_eval_batch_size",
    "sums are kept, not outputs": (
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object prediction_loss_only batch_eval_metrics"
    ),
    "weights are safetensors": "save_safetensors",
    "snapshots are kept by the coordinator": "save_on_each_node",
    "a run goes on from its last snapshot": "enable_jit_checkpoint",
    "snapshots hold all of the state": "restore_callback_states_from_checkpoint",
    "losses are written as they are": "logging_nan_inf_filter",
    "tokens are counted at every step": "include_num_input_tokens_seen",
}
"""Notes, with TRL's names that change no result and are left out."""

REFUSED = {
    "only models that transformers knows itself are trained": "trust_remote_code",
    "use attention, precision and base_model": "model_init_kwargs",
    "quantised weights are not trained: use lora, or a smaller model": "load_in_4bit load_in_8bit",
    "save the dataset with Dataset.save_to_disk": "dataset_config",
    "data is read from files: save the dataset with Dataset.save_to_disk": "dataset_streaming",
    'call the column "text"': "dataset_text_field",
    "leave it out": "dataset_kwargs ld_alpha use_weighting use_dora debug",
    "the last step of the run may be smaller: set budget.max_steps": "dataloader_drop_last",
    "columns have fixed names: see the shapes of rows": "label_names",
    "every epoch has an order of its own, by seed": "train_sampling_strategy",
    'use packing.kind = "best_fit"': "group_by_length padding_free",
    "the order of rows follows seed: set seed": "data_seed",
    "prompt and answer have max_length together: set max_length": "max_prompt_length max_completion_length",
    'rows are cut off at the end: set rows.too_long = "keep"': "truncation_mode",
    "the tokenizer's is used: change it in the tokenizer's files": "eos_token",
    "rows are packed by best fit, and none is split": "packing_strategy",
    "one loss is trained on": "loss_weights rpo_alpha",
    "use label_smoothing, which only dpo has": "label_smoothing_factor",
    "no noise is added to embeddings: leave it out": "neftune_noise_alpha",
    "the balance of experts is not trained: leave it out": "router_aux_loss_coef",
    "the divergence is the reverse KL: leave it out": "f_divergence_type",
    "the reference stays as it is: leave it out": "sync_ref_model",
    "set minibatch_size; --dry-run estimates the memory": "auto_find_batch_size",
    "losses are means over all devices' tokens": "average_tokens_across_devices",
    "use the keys of optimizer": "optim_args",
    "use lora.target_modules": "optim_target_modules",
    "a run that goes on takes the rows that come next: leave it out": "ignore_data_skip",
    "use temperature, max_completion_length and stop_token_ids": "generation_kwargs",
    "give base_model.chat_template, a template that needs none": "chat_template_kwargs",
    "logits are computed in precision, and compared in float32": "cast_lm_head_to_fp32",
    "evaluations have num_generations too: leave it out": "num_generations_eval",
    "leave it out: vLLM's own implementation is used": "vllm_model_impl",
    _BIASED: "vllm_structured_outputs_regex",
    "the correction has an upper bound only: leave it out": "vllm_importance_sampling_clip_min",
    "rewards are added up, and then made advantages": "multi_objective_aggregation",
    "no tools are called between the tokens of a sample": "max_tool_calling_iterations",
    "every token of a sample is trained on: leave it out": "top_entropy_quantile",
    "there is no bonus for entropy": "entropy_coef use_adaptive_entropy",
    "use importance_sampling_correction, and lag": "off_policy_mask_threshold",
    "the divergence is k3 without a ratio: set it to false": "use_bias_correction_kl",
    "the divergence in the reward is k1: leave it out": "kl_estimator",
    "use stop_token_ids": "stop_token",
    "rewards are shaped by functions: use a function of reward": (
        "missing_eos_penalty reward_shaping_enable_length reward_shaping_enable_repetition reward_shaping_enable_eos"
    ),
    "set budget.max_steps (a step has prompts_per_step x num_generations episodes)": "total_episodes",
    "set budget.max_steps": "num_total_batches",
    "set strategy and devices": "world_size parallelism_config",
    "set minibatch_size; of grpo and ppo, prompts_per_step and num_minibatches too": (
        "micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size"
    ),
    "leave it out: lora has one adapter": "model_adapter_name",
    "name a model with reference": "ref_adapter_name",
    "name layers in lora.target_modules": "lora_modules_to_save lora_target_parameters",
    "set lora.alpha to alpha times the root of r": "use_rslora",
    "use minibatch_size, strategy and devices": "accelerator_config",
    'use precision = "bf16"': "fp16",
    "matrices are multiplied in the precision that is set, so that results repeat": "tf32",
    "use gradient_checkpointing": "activation_offloading",
    "use compile = true": "use_liger_kernel liger_kernel_config",
    "leave it out: the default is used": "torch_compile_backend torch_compile_mode",
    'set strategy = "fsdp" and devices': "fsdp fsdp_config deepspeed",
    "set eval_steps (0 is the end of each segment)": "eval_strategy",
    "evaluations begin with the first: leave it out": "eval_delay",
    "the first evaluation is after eval.every_steps: leave it out": "eval_on_start",
    "evaluations have the metrics of the algorithm: leave it out": "include_for_metrics",
    "evaluations are computed as steps are: set precision": "bf16_full_eval fp16_full_eval",
    "use rollout infer batch": "do_predict",
    "use eval.patience, and export the snapshot that is best": "load_best_model_at_end",
    "evaluations are compared by their loss": "metric_for_best_model greater_is_better",
    "set save_steps": "save_strategy",
    "snapshots hold all of the state: use rollout snapshot export": "save_only_model",
    "name another output.dir": "overwrite_output_dir",
    "give the same command again, or --resume": "resume_from_checkpoint",
    "rollout snapshot export writes a directory that can be uploaded": "push_to_hub",
}
"""Remedies, with TRL's names that are refused."""

_FINE: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "auto"),
    "torch_dtype": ("float32", "auto"),
    "dataset_text_field": ("text",),
    "dataloader_in_order": (True,),
    "length_column_name": ("length",),
    "train_sampling_strategy": ("random",),
    "data_seed": (),
    "max_prompt_length": (),
    "max_completion_length": (),
    "truncation_mode": ("keep_start",),
    "eos_token": (*_OFF, "<EOS_TOKEN>"),
    "pad_token": ("<PAD_TOKEN>",),
    "packing_strategy": ("bfd",),
    "loss_weights": ([], [1.0]),
    "f_divergence_type": ("reverse_kl",),
    "ld_alpha": (1.0,),
    "average_tokens_across_devices": (True,),
    "vllm_model_impl": ("vllm", "auto"),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "log_completions_hub_repo": _OFF,
    "top_entropy_quantile": (1.0, 1),
    "kl_estimator": ("k1",),
    "stop_token": ("eos",),
    "total_episodes": (),
    "num_total_batches": (),
    "accelerator_config": (*_OFF, _ACCELERATOR),
    "ddp_timeout": (1800,),
    "skip_memory_metrics": (True,),
    "log_level": ("passive",),
    "log_level_replica": ("warning",),
    "log_on_each_node": (True,),
    "eval_strategy": ("steps", *_OFF),
    "eval_do_concat_batches": (True,),
    "eval_use_gather_object": _OFF,
    "prediction_loss_only": _OFF,
    "batch_eval_metrics": _OFF,
    "metric_for_best_model": ("loss", "eval_loss"),
    "save_strategy": ("steps",),
    "save_on_each_node": _OFF,
    "enable_jit_checkpoint": _OFF,
    "restore_callback_states_from_checkpoint": _OFF,
    "logging_nan_inf_filter": (True,),
    "project": ("huggingface",),
    "report_to": ("none", [], ["none"]),
    "hub_token": ("<HUB_TOKEN>",),
    "hub_always_push": _OFF,
}
"""Values that ask for what happens anyway: names in `LEFT_OUT` then need no note, names in `REFUSED` are accepted."""

KEYS: dict[str, Key] = {
    "model_name_or_path": Key("base_model.uri"),
    "model_revision": Key("base_model.revision"),
    "chat_template_path": Key("base_model.chat_template"),
    "attn_implementation": Key("attention"),
    "torch_compile": Key("compile"),
    "use_cpu": Key("device", {True: "cpu", False: None}),
    "reference_free": Key("reference", {True: "free", False: None}),
    "dataset_name": Key("dataset.path"),
    "dataset_train_split": Key("dataset.split"),
    "max_seq_length": Key("max_length"),
    "completion_only_loss": Key("loss_on.kind", {True: "completion_only", False: "all"}),
    "assistant_only_loss": Key("loss_on.kind", {True: "assistant_only", False: None}),
    "center_rewards_coefficient": Key("centre"),
    "per_device_train_batch_size": Key("minibatch_size"),
    "gradient_accumulation_steps": Key("gradient_accumulation"),
    "num_train_epochs": Key("budget.epochs"),
    "max_steps": Key("budget.max_steps", {-1: None}),
    "learning_rate": Key("optimizer.lr"),
    "weight_decay": Key("optimizer.weight_decay"),
    "adam_beta1": Key("optimizer.betas"),
    "adam_beta2": Key("optimizer.betas"),
    "adam_epsilon": Key("optimizer.eps"),
    "optim": Key("optimizer.kind", {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"}),
    "lr_scheduler_type": Key("optimizer.schedule"),
    "lr_scheduler_kwargs": Key("optimizer.min_lr_ratio"),
    "warmup_steps": Key("optimizer.warmup_steps"),
    "warmup_ratio": Key("optimizer.warmup_ratio"),
    "max_grad_norm": Key("optimizer.max_grad_norm"),
    "generation_batch_size": Key("prompts_per_step"),
    "steps_per_generation": Key("num_minibatches"),
    "use_vllm": Key("/generation.backend", {True: "vllm", False: None}),
    "vllm_mode": Key("/generation.placement", {"colocate": None}),
    "vllm_gpu_memory_utilization": Key("/generation.engine"),
    "vllm_max_model_length": Key("/generation.engine"),
    "vllm_tensor_parallel_size": Key("/generation.engine"),
    "vllm_importance_sampling_correction": Key("importance_sampling_correction", {True: None, False: "off"}),
    "vllm_importance_sampling_mode": Key("importance_sampling_correction"),
    "vllm_importance_sampling_clip_max": Key("importance_sampling_cap"),
    "vllm_importance_sampling_cap": Key("importance_sampling_cap"),
    "reward_funcs": Key("reward"),
    "reward_model_name_or_path": Key("reward"),
    "reward_weights": Key("reward"),
    "sft_model_path": Key("base_model.uri"),
    "reward_model_path": Key("reward"),
    "num_ppo_epochs": Key("num_iterations"),
    "num_mini_batches": Key("num_minibatches"),
    "response_length": Key("max_completion_length"),
    "cliprange": Key("epsilon"),
    "stop_token_id": Key("stop_token_ids"),
    "use_peft": Key("lora"),
    "lora_r": Key("lora.r"),
    "lora_alpha": Key("lora.alpha"),
    "lora_dropout": Key("lora.dropout"),
    "lora_target_modules": Key("lora.target_modules"),
    "bf16": Key("precision", {True: "bf16", False: "fp32"}),
    "activation_checkpointing": Key("gradient_checkpointing"),
    "eval_steps": Key("eval.every_steps"),
    "dataset_test_split": Key("eval_dataset.split"),
    "output_dir": Key("/output.dir"),
    "run_name": Key("/run.name"),
    "save_steps": Key("/snapshots.every_steps"),
    "save_total_limit": Key("/snapshots.keep_last"),
    **{name: Key(fine=fine, instead=_BIASED) for name, fine in SAMPLING.items()},
    **{name: Key(fine=_FINE.get(name, ()), note=note) for note, names in LEFT_OUT.items() for name in names.split()},
    **{
        name: Key(fine=_FINE.get(name, _OFF), instead=text) for text, names in REFUSED.items() for name in names.split()
    },
}
"""How each of TRL's names is treated. Names that we share, with the same meaning, are not listed."""

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
"""Our keys for which TRL has another type of value."""


def renamed(values: dict[str, Any], keys: Mapping[str, Collection[str]]) -> Renamed:
    """Translate the `values` of a configuration file to our names, with the origin of each, faults and notes.

    `keys` are our own, by algorithm.
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
    """`[algorithm.KIND]` of a file. Its keys move to their places in `result`."""

    def __init__(self, result: Renamed, kind: str, own: Collection[str], given: dict[str, Any]) -> None:
        self._result = result
        self._kind = kind
        self._own = own
        self._given = given
        self._here: Place = ("algorithm", kind)
        self._samples = "prompts_per_step" in own
        """Whether the algorithm trains on its own samples."""
        self._updates = 1
        """Optimiser updates in a step, where TRL counts updates as steps."""

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
        """Report a name that is neither TRL's nor ours; validation knows only ours."""
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
        """Accept both names, which newer versions of transformers write with one value."""
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
        """Convert batch sizes: TRL counts samples per device and calls of its model, we derive both from prompts and
        updates."""
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
        """Combine names, models and weights, which TRL has in separate keys, into one list."""
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
        """Convert vLLM's keys, which TRL ignores without use_vllm."""
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
    """Return whether `value` is among `values`, where 0 is not false and 1 is not true."""
    return any(value == one and type(value) is type(one) for one in values)
