"""Mistakes as real code has had them, each a change of one text in one module, with the tests that notice.

`run.py` plants them. A bug changes what a run computes, keeps, refuses or says, and leaves code that can be imported;
what stops the program at once teaches nothing about its tests.
"""

from __future__ import annotations

from dataclasses import dataclass

_PARITY = "tests/testing/test_parity.py::test_ragged_masks_with_different_token_counts_per_rank"
_FSDP2, _DDP = f"{_PARITY}[fsdp2-2]", f"{_PARITY}[ddp-2]"
_PLAIN = "tests/testing/test_parity.py::test_one_process_is_a_loop_of_plain_torch"
_CP = "tests/parallel/test_context_parallel.py::test_parity_of_architectures[llama-cp2-allgather]"
_ULYSSES = "tests/parallel/test_context_parallel.py::test_parity_of_architectures[gpt2-cp2-ulysses]"
_DOCUMENTS = "tests/parallel/test_context_parallel.py::test_documents_and_padding"
_TP = "tests/parallel/test_tensor_parallel.py"
_TP_PLAN = "tests/parallel/test_tensor_parallel_plan.py"
_BY_HAND = "plugins/fsdp2/tests/test_fsdp2_tensor.py::test_a_loop_by_hand_refuses_a_plan_that_leaves_out_norms_of_heads"
_STYLES = "tests/parallel/test_tensor_parallel_styles.py"
_CHAINS = f"{_STYLES}::test_collectives_and_their_gradients_are_those_of_whole_tensors"
_STATISTICS = "tests/step/test_token_statistics.py"
_ROWS = "tests/step/test_row_loss.py"
_HEADS = "tests/step/test_heads.py"
_SEQUENCE = "tests/parallel/test_tensor_parallel_sequence.py::test_plans_of_the_user"
_EXPERTS = "tests/parallel/test_expert_parallel.py"
_ROUTERS = "tests/step/test_router_loss.py"
_FAULTS = "tests/checkpoint/test_checkpoint_faults.py"
_LAYOUTS = "tests/checkpoint/test_checkpoint.py::test_any_layout_goes_on_from_what_any_other_has_saved"
_DATA = "tests/data/test_data.py"
_ROWS_OF_RUNS = "tests/data/test_rows.py"
_STREAMED = "tests/data/test_streams.py"
_SOURCES = "tests/data/test_sources.py"
_TRAIN = "tests/train/test_train.py"
_FIT, _FIT_RUN = "tests/train/test_fit.py", "tests/train/test_fit_run.py"
_REFUSED = f"{_FIT_RUN}::test_an_objective_that_the_data_do_not_serve_is_refused_before_anything_starts"
_OPTIM = "tests/optim/test_optim.py"
_GROUPS = "tests/optim/test_optimizer_groups.py"
_EMA = "tests/optim/test_ema.py"
_RUN = "tests/train/test_run_directory.py"
_REPLAY = "tests/diagnose/test_replay.py"
_REGISTRY = "tests/contract/test_registry.py"
_HELD_BY_THREADS = "tests/model/test_memory.py::test_what_a_thread_of_gloo_is_about_to_let_go_of_is_not_held"
_F = "plugins/fsdp2/tests"
_D = "plugins/ddp/tests"
_M = "plugins/megatron_fsdp/tests"
_P = "plugins/pipeline/tests"
_ARGUMENTS = "plugins/trainer/tests/test_arguments.py"
_ACTS = f"{_ARGUMENTS}::test_an_argument_that_acts_does_what_it_does_without_a_mesh"
_COUNTS = f"{_F}/test_fsdp2_counts.py"
_UNUSED = f"{_F}/test_fsdp2.py::test_ranks_that_use_different_parameters_and_parameters_that_none_uses"
_BUCKETED = f"{_D}/test_ddp_bucketed.py"
_SCHEDULES = f"{_P}/test_schedules.py::test_orders_are_those_of_torch_wherever_torch_takes_the_numbers"
_STAGES = f"{_P}/test_pipeline.py::test_every_schedule_over_fsdp2"
_TWO_BY_TWO = f"{_P}/test_pipeline.py::test_cases_over_two_stages_and_two_data_ranks"
_ZERO = f"{_M}/test_megatron_fsdp.py::test_every_layout_equals_a_single_process"


@dataclass(frozen=True)
class Bug:
    """A bug.

    Attributes:
        name: identifier.
        module: whose source is changed.
        old: text that occurs once in it.
        new: what takes its place.
        caught_by: ids of tests that fail under it, the cheapest ones.
        kind: the mistake that it stands for.
    """

    name: str
    module: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    kind: str


BUGS: list[Bug] = []


def _bug(name: str, module: str, old: str, new: str, *caught_by: str, kind: str) -> None:
    BUGS.append(Bug(name, module, old, new, caught_by, kind))


# -- replay

_bug(
    "shares_are_compared_with_the_wrong_rank",
    "meshwright.replay.peers",
    "own, other = by_place[share, stage, place], by_place[(share - 1) % data_size, stage, place]",
    "own, other = by_place[share, stage, place], by_place[(share + 1) % data_size, stage, place]",
    f"{_REPLAY}::test_healthy_ranks_give_no_alarm[ddp]",
    kind="ranks that compute right are named as wrong",
)
_bug(
    "one_process_draws_for_the_first_rank_alone",
    "meshwright.replay.single",
    "torch.manual_seed(step_seed(self._seed, self._step, share))",
    "torch.manual_seed(step_seed(self._seed, self._step, 0))",
    f"{_REPLAY}::test_one_process_agrees_in_float64_with_the_random_numbers_of_all_data_ranks[ddp]",
    kind="what is done again draws other random numbers",
)

# -- base, files, launch, cli

_bug(
    "unknown_keys_pass",
    "meshwright.base.validation",
    'extra="forbid"',
    'extra="ignore"',
    f"{_DATA}::test_unknown_key_error_names_the_nearest_key",
    kind="an option that is misspelt is dropped without a word",
)
_bug(
    "words_pass_for_numbers",
    "meshwright.base.validation",
    "strict=True,\n        validate",
    "strict=False,\n        validate",
    "tests/train/test_runfile.py::test_no_value_is_taken_for_one_of_another_type[nproc: true-nproc: Input should be a valid "
    "integer (got True)]",
    kind="a value of another type is taken for a number",
)
_bug(
    "equal_whatever_they_say",
    "meshwright.base.validation",
    "and self._data() == other._data()",
    "and True",
    "tests/contract/test_configs.py::test_configs_that_differ_in_an_option_are_not_equal",
    kind="configs that differ in an option are equal",
)
_bug(
    "json_loses_dtypes",
    "meshwright.base.validation",
    'return str(value).removeprefix("torch.")',
    "return None",
    "tests/contract/test_configs.py::test_objects_are_kept_in_dicts_and_named_in_json",
    kind="a round trip through JSON loses a field",
)
_bug(
    "keys_given_twice",
    "meshwright.files.parsing",
    "if key.value in seen:",
    "if False:",
    "tests/train/test_runfile.py::test_a_file_that_holds_no_run_is_an_error_that_names_the_file[steps: 1\\nsteps: 2-the key 'steps' is given twice]",
    kind="of a key that is given twice, the first value is dropped without a word",
)
_bug(
    "tags_of_yaml_are_built",
    "meshwright.files.parsing",
    'if getattr(event, "tag", None) is not None:',
    "if False:",
    "tests/train/test_runfile.py::test_tags_are_refused[!!timestamp x]",
    kind="a file says what is made of its values",
)
_bug(
    "refused_modules_are_imported",
    "meshwright.files.class_paths",
    "    module = _within(name, _BUILT_IN)\n",
    '    module = _within(name, ("torch", *_BUILT_IN))\n',
    "tests/contract/test_imports.py::test_refused[class-torch.utils.cpp_extension.BuildExtension]",
    kind="a name in a file imports what starts processes",
)
_bug(
    "nodes_with_one_task_count",
    "meshwright.launch.slurm",
    "counts += [int(count)] * int(times or 1)",
    "counts += [int(count)]",
    "tests/launch/test_slurm.py::test_a_task_of_a_step_gets_the_variables_of_torchrun",
    kind="nodes of a cluster are counted wrongly, and ranks get each other's devices",
)
_bug(
    "worlds_of_one",
    "meshwright.launch.mpi",
    '    if environment.get(names[0], "") in ("", "1"):',
    "    if True:",
    "tests/launch/test_slurm.py::test_several_processes_that_cannot_find_each_other_are_refused[environment2-one of 2 "
    "processes (OMPI_COMM_WORLD_SIZE)]",
    kind="several processes train alone, each in a world of one",
)
_bug(
    "exit_code_lost",
    "meshwright.launch.rank",
    "return cls(error.exit_code, text, echo, timed_out)",
    "return cls(1, text, echo, timed_out)",
    "tests/launch/test_launch.py::TestOutsideAWorld::test_user_error_is_its_message_and_where_to_read_on",
    kind="wrong input ends with the exit code of a crash",
)
_bug(
    "dead_rank_not_told",
    "meshwright.launch.local",
    'say(f"rank {rank} was killed by {signal_name(-failure.exitcode)}{hint}\\n", stderr=True)',
    "del hint",
    "tests/launch/test_launch.py::test_killed_rank_is_named_with_its_signal",
    kind="a rank that was killed is not named",
)
_bug(
    "errors_end_well",
    "meshwright.files.commands",
    "raise SystemExit(error.exit_code) from None",
    "raise SystemExit(0) from None",
    "tests/cli/test_cli.py::test_bad_input_is_one_error_before_anything_is_started_or_written[unknown key]",
    kind="exit code 0 for a run that was refused",
)
_bug(
    "every_rank_tells",
    "meshwright.files.commands",
    'if self._everywhere or os.environ.get("LOCAL_RANK", "0") == "0":',
    "if True:",
    "tests/cli/test_cli.py::test_only_the_first_rank_of_each_node_tells_the_error",
    kind="one error is told by every rank",
)
_bug(
    "commands_are_replaced",
    "meshwright.cli.main",
    "taken = set(get_group(own).commands) & set(get_group(app).commands)",
    "taken: set[str] = set(get_group(own).commands) - set(get_group(own).commands)",
    f"{_REGISTRY}::test_a_command_that_exists_cannot_be_replaced",
    kind="a plugin hides a command of another",
)

# -- mesh, tensors

_bug(
    "data_ranks_collide",
    "meshwright.mesh.mesh",
    'return self._ranks["dp_replicate"] * self.degrees.dp_shard + self._ranks["dp_shard"]',
    'return self._ranks["dp_replicate"] + self._ranks["dp_shard"]',
    "tests/contract/test_mesh.py::test_ranks_that_must_see_one_batch_share_a_data_rank[sizes3-expected3]",
    kind="ranks of HSDP see the same batch",
)
_bug(
    "tokens_of_all_ranks_count",
    "meshwright.mesh.mesh",
    'return all(self._ranks[axis] == 0 for axis in ("pp", "cp", "tp"))',
    "return True",
    "tests/step/test_batch.py::test_tokens_are_those_after_the_shift_and_count_once_for_ranks_that_share_a_batch",
    kind="tokens count once for each rank that shares a batch",
)
_bug(
    "view_without_cp",
    "meshwright.mesh.sizes",
    '"dp_cp": ("dp_replicate", "dp_shard", "cp"),',
    '"dp_cp": ("dp_replicate", "dp_shard"),',
    "tests/contract/test_mesh.py::test_views_join_neighbouring_axes",
    kind="the wrong group: dp in the place of dp_cp",
)
_bug(
    "error_of_one_rank_alone",
    "meshwright.mesh.world",
    "            error = caught\n        self.raise_together(error)",
    "            raise caught\n        self.raise_together(error)",
    "tests/contract/test_mesh.py::test_an_error_of_one_rank_is_raised_on_all_with_one_text",
    kind="an error is raised on one rank, and its peers wait",
)
_bug(
    "groups_wait_half_an_hour",
    "meshwright.mesh.world",
    "return dist.new_group(backend=backend, timeout=group_timeout())",
    "return dist.new_group(backend=backend)",
    "tests/launch/test_timeouts.py::test_every_process_group_waits_as_long_as_the_run_asks_for[ddp]",
    kind="the timeout of a run is not passed on to the groups that it makes",
)
_bug(
    "norm_of_local_shards",
    "meshwright.tensors.norms",
    "        dist.all_reduce(result, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)",
    "        pass",
    "tests/optim/test_norms.py::test_norm_and_scale_over_mixed_placements[2.0]",
    kind="a norm over the local shards",
)
_bug(
    "copies_count_in_the_norm",
    "meshwright.tensors.norms",
    "for axis, placement in enumerate(tensor.placements) if is_sharded(placement))",
    "for axis, placement in enumerate(tensor.placements) if placement is not None)",
    "tests/optim/test_norms.py::test_norm_and_scale_over_mixed_placements[2.0]",
    kind="replicated gradients are counted once for each copy",
)
_bug(
    "small_gradients_grow",
    "meshwright.tensors.norms",
    "(max_norm / (total_norm + 1e-6)).clamp(max=1.0)",
    "max_norm / (total_norm + 1e-6)",
    "tests/optim/test_norms.py::test_gradients_below_the_limit_stay_as_they_are",
    kind="clipping scales small gradients up",
)
_bug(
    "half_precision_norms",
    "meshwright.tensors.norms",
    "torch.float64 if wide else torch.promote_types(tensors[0].dtype, torch.float32)",
    "torch.float64 if wide else tensors[0].dtype",
    "tests/optim/test_norms.py::test_half_precision_is_summed_in_float32",
    kind="a sum of squares in half precision",
)
_bug(
    "wide_sums_forget",
    "meshwright.tensors.norms",
    "            wide.add_(waiting)",
    "            pass",
    f"{_D}/test_ddp.py::test_a_parameter_without_gradient_in_some_microbatches_keeps_the_gradient_of_the_others[float64]",
    kind="gradients of all microbatches but the last are lost",
)
_bug(
    "stretches_begin_a_row_late",
    "meshwright.tensors.pieces",
    "    first, last = -(-start // row), end // row",
    "    first, last = start // row, end // row",
    "tests/tensors/test_pieces.py::test_a_stretch_is_few_rectangles_which_are_its_elements",
    kind="the part of a parameter that a rank owns begins in the wrong row",
)

# -- model

_bug(
    "other_dropout_again",
    "meshwright.model.recompute",
    "preserve_rng_state=True",
    "preserve_rng_state=False",
    "tests/model/test_recompute.py::test_dropout_is_drawn_again_alike_and_a_block_in_two_places_is_wrapped_once[full]",
    kind="recomputation draws other dropout than the forward did",
)
_bug(
    "single_holds_activations",
    "meshwright.single.manager",
    "checkpoint_blocks(model, self.layout, self.config.activation_checkpointing)",
    "checkpoint_blocks(model, self.layout, False)",
    "tests/model/test_recompute.py::test_single_recomputes_as_other_strategies_do",
    kind="an option is taken and does nothing",
)
_bug(
    "evaluation_is_recomputed",
    "meshwright.model.recompute",
    "if not (block.training and torch.is_grad_enabled()):",
    "if False:",
    "tests/model/test_recompute.py::test_evaluation_is_not_touched",
    kind="what is for training acts in evaluation, too",
)
_bug(
    "ties_are_lost",
    "meshwright.model.weights",
    "        for name in names[1:]:",
    "        for name in names[:0]:",
    "tests/model/test_deferred.py::test_sharded_on_meta_and_trained_bit_for_bit_as_without[single-1-{}-True]",
    kind="tied weights come apart where a model gets its memory",
)
_bug(
    "pickles_are_loaded_whole",
    "meshwright.model.pretrained.files",
    "weights_only=True, mmap",
    "weights_only=False, mmap",
    "tests/model/test_pretrained.py::test_a_pickle_that_holds_more_than_tensors_is_an_error",
    kind="a pickle of somebody else runs",
)

# -- strategy

_bug(
    "the_first_alias_wins",
    "meshwright.strategy.registry",
    "        if len(claimants) > 1:",
    "        if len(claimants) > 2:",
    f"{_REGISTRY}::test_an_alias_of_two_strategies_stands_for_neither_whatever_the_order[one]",
    kind="the order of installation decides what an alias means",
)
_bug(
    "a_broken_plugin_breaks_all",
    "meshwright.strategy.registry",
    "plugin = entry_point.load()\n        except (Exception, SystemExit) as error:",
    "plugin = entry_point.load()\n        except ImportError as error:",
    f"{_REGISTRY}::test_a_broken_plugin_is_told_at_its_name_and_in_the_list_and_the_others_work[error at import]",
    kind="a plugin that cannot be imported takes the others with it",
)
_bug(
    "options_ignored",
    "meshwright.strategy.stack",
    "        stack = Stack(_layer(named, config))",
    "        stack = Stack(_layer(named, {}))",
    "tests/contract/test_stack.py::test_options_reach_the_named_strategy_and_its_wrapper",
    kind="the options of a run do not reach its strategy",
)
_bug(
    "any_base_of_configs_is_nearer_than_a_strategy",
    "meshwright.strategy.stack",
    "        or [spec.name for spec in specs if issubclass(spec.config_cls, own)]\n",
    "",
    "tests/contract/test_stack.py::test_the_strategy_follows_from_bases_and_subclasses_of_its_config",
    kind="a config trains under another strategy than its own",
)
_bug(
    "unclaimed_axes_pass",
    "meshwright.strategy.stack",
    "        if axis not in stack.claims:",
    "        if axis not in stack.claims and False:",
    "tests/contract/test_stack.py::test_an_axis_that_nobody_claims_is_an_error_with_who_could_and_what_to_change"
    "[shards-sizes0-4-texts0]",
    kind="validation that is there but does not run",
)

# -- step, manager

_bug(
    "highest_logit_of_the_shard",
    "meshwright.step.token_statistics",
    '    scale_RC = (each["highest"] - highest_C).exp_()',
    '    scale_RC = torch.ones_like(each["highest"])',
    f"{_STYLES}::test_loss_of_sharded_logits_is_that_of_whole_ones[2-7-torch.float64-1.0-ragged]",
    kind="each shard is shifted by a maximum of its own",
)
_bug(
    "masked_targets_get_gradients",
    "meshwright.step.token_statistics",
    'chosen_CK = torch.where(ids_CK != IGNORED_LABEL, weights.get("log_probs", none_C[:, None]), 0.0)',
    'chosen_CK = weights.get("log_probs", none_C[:, None])',
    f"{_STATISTICS}::test_statistics_and_loss_and_their_gradients_are_those_of_whole_logits[linear-5]",
    kind="masks are ignored in backward",
)
_bug(
    "rounded_before_one_is_taken_away",
    "meshwright.step.token_statistics",
    "return found_CL.scatter_(1, local_CK, own_CK.to(dtype))",
    "return found_CL.scatter_add_(1, local_CK, chosen_CK.to(dtype))",
    f"{_STATISTICS}::test_half_precision_is_computed_in_float32_and_rounded_once",
    kind="a difference of rounded numbers in half precision",
)
_bug(
    "gradients_of_equal_ids_overwritten",
    "meshwright.step.token_statistics",
    "        if chosen_CK.shape[1] == 1:\n",
    "        if chosen_CK.shape[1]:\n",
    f"{_STATISTICS}::test_statistics_and_loss_and_their_gradients_are_those_of_whole_logits[linear-5]",
    kind="of several gradients of one element, the last one counts",
)
_bug(
    "highest_of_this_rank",
    "meshwright.step.token_statistics",
    "    return Measures(highest_C + sum_C.log(), highest_C,",
    "    return Measures(highest_C + sum_C.log(), exponentials.highest_C,",
    f"{_STATISTICS}::test_ranks_that_share_the_vocabulary_find_what_one_does[2-19]",
    kind="a maximum over this rank's part is taken for that over all",
)
_bug(
    "gradients_of_the_last_chunk",
    "meshwright.step.rows",
    "left_LC @ right_CH if before is None else before.addmm_(left_LC, right_CH)",
    "left_LC @ right_CH",
    f"{_STATISTICS}::test_statistics_and_loss_and_their_gradients_are_those_of_whole_logits[linear-5]",
    kind="a gradient is that of the last part, not of all",
)
_bug(
    "gradients_ahead_for_all_microbatches",
    "meshwright.step.rows",
    "    if has_gradient and waiting:",
    "    if has_gradient and waiting and False:",
    f"{_STATISTICS}::test_gradients_that_wait_for_a_backward_are_made_for_one_microbatch_only",
    kind="memory grows with the number of microbatches that are under way",
)
_bug(
    "rows_untried",
    "meshwright.manager.row_loss",
    '        return None if difference <= limit else f"row by row, they differ by {difference:.3g}"',
    "        return None",
    f"{_ROWS}::test_what_is_done_to_logits_is_done_to_rows_or_told[mixing-head]",
    kind="a model that needs another way of computing is not found out",
)
_bug(
    "head_over_a_part_of_a_sequence",
    "meshwright.parallel.context.probe",
    "if probe.logits is not None and probe.logits.dim() != 3 and not _takes_last(probe, ids):",
    "if False:",
    "tests/step/test_heads.py::test_what_a_head_cannot_do_is_told_on_all_ranks_before_the_first_step[cp, of the first token]",
    kind="what a rank finds in its part is taken for what is found in the whole",
)
_bug(
    "token_loss_of_any_head",
    "meshwright.manager.row_loss",
    "            if self._vocab_size is not None:\n",
    "            if False:\n",
    f"{_HEADS}::test_what_a_head_cannot_do_is_told_on_all_ranks_before_the_first_step[no objective]",
    kind="a loss is taken of what it is not the loss of",
)
_bug(
    "tried_with_one_sequence",
    "meshwright.manager.forward",
    "self._few(given.inputs(microbatch), sequences=2)",
    "self._few(given.inputs(microbatch))",
    f"{_HEADS}::test_what_a_head_cannot_do_is_told_on_all_ranks_before_the_first_step[no padding]",
    kind="a trial is smaller than what may go wrong",
)
_bug(
    "one_row_of_positions_left_long",
    "meshwright.manager.forward",
    "if tensor.shape[dim] == whole else tensor",
    "if tensor.shape[:2] == (rows, whole) else tensor",
    f"{_ROWS}::test_positions_may_be_one_row_for_all_sequences",
    kind="one of the shapes that an entry may have is forgotten",
)
_bug(
    "rehearsed_with_whole_logits",
    "meshwright.manager.row_loss",
    "        head = self._head_for(rows)\n",
    "        head = None\n",
    f"{_ROWS}::test_every_layout_trains_and_evaluates_by_rows_and_holds_logits_of_no_more[pp-1f1b]",
    kind="what is tried before the first step holds more than a step",
)
_bug(
    "dtype_of_outputs_forgotten",
    "meshwright.manager.row_loss",
    "logits if logits.dtype == self._dtype else logits.to(self._dtype)",
    "logits",
    f"{_ROWS}::test_loss_and_gradients_pass_by_the_dtype_of_a_models_outputs[rounded-outputs]",
    kind="an option is lost on a new way of computing the same",
)
_bug(
    "loss_of_local_tokens",
    "meshwright.manager.row_loss",
    "return target_loss_sum(outputs.logits, targets_BS) / num_tokens, outputs",
    "return target_loss_sum(outputs.logits, targets_BS) / (targets_BS >= 0).sum().clamp(min=1), outputs",
    _DDP,
    kind="divided by the tokens of the rank, not of the global batch",
)
_bug(
    "loss_over_dp_alone",
    "meshwright.manager.data_parallel",
    'over = self.mesh.group("dp_cp")',
    'over = self.mesh.group("dp")',
    _CP,
    kind="the wrong group: dp in the place of dp_cp",
)
_bug(
    "norm_after_clipping",
    "meshwright.manager.data_parallel",
    "            self.gradients.scale(norm, max_norm)\n",
    "            self.gradients.scale(norm, max_norm)\n            norm = self.gradients.total_norm(norm_type)\n",
    _PLAIN,
    kind="the norm that is reported is that of clipped gradients",
)
_bug(
    "reduced_in_every_microbatch",
    "meshwright.manager.data_parallel",
    "is_last = index == len(microbatches) - 1",
    "is_last = True",
    f"{_D}/test_ddp.py::test_gradients_are_reduced_once_a_step_however_many_microbatches[3-config0]",
    kind="gradients that are summed already are reduced again",
)
_bug(
    "never_the_last_microbatch",
    "meshwright.manager.data_parallel",
    "is_last = index == len(microbatches) - 1",
    "is_last = index == len(microbatches)",
    _DDP,
    kind="gradients are not reduced in the last microbatch",
)
_bug(
    "dropout_in_evaluation",
    "meshwright.manager.data_parallel",
    "        self.module.eval()\n",
    "        self.module.train()\n",
    "tests/train/test_train.py::test_evaluation_draws_no_dropout[{}]",
    kind="evaluation runs in training mode",
)
_bug(
    "stale_gradients_are_added",
    "meshwright.manager.data_parallel",
    "        check_nothing_pending(self.trainable())\n",
    "",
    "tests/step/test_batch.py::test_calls_out_of_order_are_told[single]",
    kind="gradients of an earlier step join those of the next",
)
_bug(
    "unused_parameters_get_zeros",
    "meshwright.manager.ending",
    "if part is self._shared or parameter not in shared:",
    "if part is self._shared:",
    f"{_UNUSED}[sizes0-None-config1]",
    kind="decay and momentum move parameters that nobody used",
)
_bug(
    "each_rank_its_own_copy",
    "meshwright.manager.start",
    'for axis in ("pp", "dp", "cp", "tp"):',
    'for axis in ("pp", "cp", "tp"):',
    "tests/testing/test_parity.py::test_copies_built_from_different_seeds_start_from_the_first_rank[ddp]",
    kind="copies start from different weights",
)
_bug(
    "dropout_differs_along_tp",
    "meshwright.manager.start",
    '    dist.broadcast(seed, group=mesh.group("tp"), group_src=0)\n',
    "",
    "tests/model/test_loading.py::test_ranks_that_share_layers_share_the_random_state_of_dropout",
    kind="ranks that hold the same activations draw different dropout",
)
_bug(
    "coarse_sums_pass",
    "meshwright.manager.start",
    "if torch.promote_types(dtype, parameter.dtype) != dtype:",
    "if False:",
    f"{_BUCKETED}::test_what_cannot_act_on_this_mesh_or_model_is_refused_on_all_ranks[config2-ModelError: "
    "reduce_dtype=float32 is coarser]",
    kind="gradients are summed in a coarser dtype than they have",
)
_bug(
    "gradients_stay_after_the_step",
    "meshwright.manager.data_parallel",
    "        optimizer.zero_grad(set_to_none=True)\n",
    "",
    _PLAIN,
    kind="gradients are not dropped after the step",
)
_bug(
    "labels_not_shifted",
    "meshwright.step.token_loss",
    "return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED_LABEL)",
    "return labels_BS",
    "tests/step/test_batch.py::test_tokens_are_those_after_the_shift_and_count_once_for_ranks_that_share_a_batch",
    kind="labels are not shifted, and the model learns to copy",
)
_bug(
    "labels_shifted_twice",
    "meshwright.step.token_loss",
    "return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED_LABEL)",
    "return F.pad(labels_BS[:, 2:], (0, 2), value=IGNORED_LABEL)",
    "tests/step/test_batch.py::test_tokens_are_those_after_the_shift_and_count_once_for_ranks_that_share_a_batch",
    kind="labels are shifted by the data and by the loss",
)
_bug(
    "mean_over_tokens",
    "meshwright.step.token_loss",
    'ignore_index=IGNORED_LABEL, reduction="sum")',
    'ignore_index=IGNORED_LABEL, reduction="mean")',
    _DDP,
    kind="a mean in the place of a sum",
)
_bug(
    "loss_in_half_precision",
    "meshwright.step.token_loss",
    "        logits_BSV = logits_BSV.float()\n",
    "        pass\n",
    "tests/step/test_batch.py::test_the_loss_of_logits_in_half_precision_is_that_in_float32",
    kind="the loss is computed in the half precision of the logits",
)
_bug(
    "loss_summed_in_float32",
    "meshwright.manager.ending",
    "[known, *self._own_used], dtype=torch.float64)",
    "[known, *self._own_used], dtype=torch.float32)",
    _DDP,
    kind="sums over ranks lose digits",
)
_bug(
    "tokens_of_sharers_count_twice",
    "meshwright.step.agreement",
    "COUNTED, terms.tokens(microbatches) if _counts(mesh) else 0)",
    "COUNTED, terms.tokens(microbatches))",
    "tests/step/test_batch.py::test_tokens_are_those_after_the_shift_and_count_once_for_ranks_that_share_a_batch",
    kind="tokens of ranks that share a batch are counted once for each",
)
_bug(
    "uneven_ranks_are_not_heard",
    "meshwright.mesh.world",
    "            self._pass(self.rank + power, receive=theirs)\n            combine()\n",
    "            self._pass(self.rank + power, receive=theirs)\n",
    "tests/step/test_lean_step.py::test_sums_and_highest_values_are_those_of_all_ranks[3]",
    kind="of a number of ranks that is no power of two, some have no say",
)
_bug(
    "defects_are_read_and_not_told",
    "meshwright_megatron_fsdp.reduction",
    "is_wrong=values.any() if values is not None and not late else bool(late)",
    "is_wrong=bool(late)",
    f"{_M}/test_megatron_fsdp_options.py::test_check_for_nan_in_grad_refuses_the_step_on_all_ranks",
    kind="what one rank finds wrong on its device is not told to the others",
)
_bug(
    "undrawn_is_not_told",
    "meshwright.train.loop.ahead",
    "            raise_on_all(self._manager.mesh.world, error, BatchError, what)\n",
    "            raise drawn.error\n",
    "tests/train/test_train.py::test_what_is_wrong_with_a_step_that_was_begun_ahead_is_told_to_all_ranks[culprits0-2]",
    kind="a rank that cannot draw its microbatches raises alone, and the others wait for it",
)
_bug(
    "rows_of_no_entries",
    "meshwright.step.rows",
    "logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])",
    "logits.reshape(-1, logits.shape[-1])",
    f"{_STYLES}::test_loss_of_sharded_logits_is_that_of_whole_ones[4-6-torch.float64-3.0-ragged]",
    kind="a rank without an entry of the vocabulary fails alone",
)
_bug(
    "drawn_ahead_from_other_numbers",
    "meshwright.train.loop.ahead",
    "        torch.set_rng_state(drawn.generator)\n",
    "",
    "tests/train/test_train.py::test_a_step_that_is_begun_ahead_is_the_step_that_it_would_be",
    kind="a step has other random numbers when it has been begun ahead, so that a run that goes on is another",
)
_bug(
    "others_than_announced",
    "meshwright.step.agreement",
    "if microbatches is not num_tokens.announced.microbatches:",
    "if False:",
    "tests/step/test_lean_step.py::test_an_announced_step_is_refused_alike_on_all_ranks_whoever_reads_its_count[1-0]",
    kind="a step is trained on other microbatches than the ranks have agreed on",
)
_bug(
    "announced_steps_are_not_checked",
    "meshwright.step.agreement",
    "return cls(mesh, defect, given)",
    "return cls(mesh, None if given == ANNOUNCED else defect, given)",
    "tests/step/test_lean_step.py::test_an_announced_step_is_refused_alike_on_all_ranks_whoever_reads_its_count[1-None]",
    kind="what a rank finds wrong with a step that has been begun ahead is not told",
)
_bug(
    "no_target_at_all",
    "meshwright.step.agreement",
    "if total < 1:",
    "if total < 0:",
    "tests/step/test_batch.py::test_step_without_any_target_is_refused",
    kind="a step without targets divides by zero",
)
_bug(
    "documents_see_each_other",
    "meshwright.step.batch",
    "return [_without_mask(batch) if _restarts(batch) else batch for batch in microbatches]",
    "return [*microbatches]",
    "tests/data/test_packing.py::test_documents_in_one_row_with_a_mask_of_ones_train_as_in_rows_of_their_own[single-sizes0]",
    kind="positions of one document are seen by the next",
)
_bug(
    "other_batches_on_tp",
    "meshwright.step.agreement",
    "    if answer.shares:",
    "    if False:",
    "tests/step/test_batch.py::test_ranks_that_share_a_batch_must_have_the_same_tokens[0]",
    kind="ranks that share a batch read different ones without a word",
)
_bug(
    "router_loss_of_the_local_batch",
    "meshwright.step.router_loss",
    "        dist.all_reduce(every, group=group)\n",
    "",
    f"{_ROUTERS}::test_statistics_are_those_of_all_ranks[1-True-megatron_fsdp-2-{{}}-{{}}-2]",
    kind="the router loss is that of the local batch",
)
_bug(
    "router_loss_of_each_microbatch",
    "meshwright.step.router_loss",
    "(self._coefficient / microbatches)",
    "self._coefficient",
    f"{_ROUTERS}::test_the_loss_of_a_step_is_the_mean_of_what_its_microbatches_give",
    kind="the router loss grows with the number of microbatches",
)
_bug(
    "padding_is_routed",
    "meshwright.step.router_loss",
    "dtype=dtype) if mask is None else mask.flatten().to(dtype)",
    "dtype=dtype)",
    f"{_ROUTERS}::test_the_loss_is_that_of_the_models_own_forward[True-mixtral]",
    kind="masked tokens count in statistics",
)

# -- parallel.tensor

_bug(
    "partial_gradients_pass",
    "meshwright.parallel.tensor.collectives",
    'return all_reduce(grad, "sum", ctx.group), None',
    "return grad, None",
    f"{_CHAINS}[copy-reduce-0]",
    kind="gradients of what is used in parts are not summed",
)
_bug(
    "gathered_gradients_are_summed",
    "meshwright.parallel.tensor.collectives",
    "return _own(grad, ctx.dim, ctx.group), None, None, None",
    'return _own(all_reduce(grad, "sum", ctx.group), ctx.dim, ctx.group), None, None, None',
    f"{_CHAINS}[split-gather-0]",
    kind="gradients grow with the number of ranks",
)
_bug(
    "uneven_chunks",
    "meshwright.parallel.tensor.collectives",
    "    step = -(-size // count)\n",
    "    step = max(1, size // count)\n",
    f"{_STYLES}::test_chunks_are_those_of_torch",
    kind="a vocabulary that the ranks do not divide is cut in another way than its weights",
)
_bug(
    "bias_of_every_rank",
    "meshwright.parallel.tensor.styles",
    "return _summed(parallel, module, output) + bias",
    "return _summed(parallel, module, output + bias)",
    f"{_TP}::test_models[biases-starcoder2-False]",
    kind="the bias of a row-parallel layer is added by every rank",
)
_bug(
    "rows_of_other_ranks",
    "meshwright.parallel.tensor.styles",
    "            rows = torch.where(here[..., None], rows, 0.0)\n",
    "",
    f"{_TP}::test_options[foreach-False]",
    kind="ids of other ranks' entries of the vocabulary are looked up, too",
)
_bug(
    "rotary_part_is_partial",
    "meshwright.parallel.tensor.styles",
    "return torch.cat([latent, Copy.apply(rope, parallel.group)], dim=-1)",
    "return torch.cat([latent, rope], dim=-1)",
    f"{_TP}::test_models[latent-attention-deepseek_v2-False]",
    kind="one branch of a layer lacks the sum of its gradients",
)
_bug(
    "vocabulary_begins_at_zero",
    "meshwright.parallel.tensor.collectives",
    "        return cls(entries, group, sum(sizes[: dist.get_rank(group)]))",
    "        return cls(entries, group, 0 * sum(sizes))",
    f"{_STYLES}::test_loss_of_sharded_logits_is_that_of_whole_ones[2-7-torch.float64-1.0-ragged]",
    kind="every rank takes its entries of the vocabulary for the first ones",
)
_bug(
    "key_heads_of_the_first_rank",
    "meshwright.parallel.tensor.heads",
    "read = [(rank * count + index) // groups for index in range(count)]",
    "read = [index // groups for index in range(count)]",
    f"{_TP}::test_key_heads_that_the_ranks_do_not_divide[three_kv_heads-2]",
    kind="all ranks compute with the first rank's key heads",
)
_bug(
    "norms_meet_a_part",
    "meshwright.parallel.tensor.placements",
    "        partial |= parts.on_shard\n",
    "        pass\n",
    f"{_SEQUENCE}[one-layer]",
    kind="gradients of replicated norms are not summed under sequence parallelism",
)
_bug(
    "plain_partial_gradients",
    "meshwright.parallel.tensor.local_parameters",
    "local = Copy.apply(parameter, self._mesh.get_group()) if cut.partial else parameter",
    "local = parameter",
    f"{_TP}::test_models_with_plain_parameters[apertus-False]",
    kind="gradients of what meets a part of the activations are not summed",
)
_bug(
    "wrong_plans_train",
    "meshwright.parallel.tensor.parallel",
    "differs = (high + low).abs() > 1e-2 * high",
    "differs = (high + low).abs() > 1e2 * high",
    f"{_TP}::test_a_plan_that_leaves_out_a_norm_of_heads_is_refused_with_nothing_trained[q_norm]",
    kind="a plan that forgets a parameter is not found",
)

_bug(
    "layers_of_other_stages_are_unknown",
    "meshwright.parallel.tensor.plan",
    "        met.update(each for full in elsewhere for each in spellings(full))",
    "        del elsewhere",
    "plugins/pipeline/tests/test_pipeline.py::test_plans_of_layers_that_one_stage_has[named]",
    kind="a plan for a layer of another stage of a pipeline is refused",
)
_bug(
    "positions_in_torch_styles_are_ignored",
    "meshwright.parallel.tensor.torch_styles",
    "        or _POSITIONS in (*_layouts(style,",
    "        or None in (*_layouts(style,",
    f"{_TP_PLAN}::test_layouts_that_shard_positions_turn_sequence_parallelism_on",
    kind="layouts of torch's styles are ignored",
)
_bug(
    "heads_give_parts_of_logits",
    "meshwright.parallel.tensor.module_styles",
    "if name == layout.head or not is_taken:",
    "if False:",
    f"{_TP}::test_plans_of_the_user[head-in-parts]",
    kind="the loss of a part of the logits, another one on each rank",
)
_bug(
    "steps_of_managers_are_checked_as_loops_by_hand",
    "meshwright.parallel.tensor.parallel",
    "            if is_reduced and not self._step.is_inside and (defect",
    "            if is_reduced and (defect",
    "plugins/fsdp2/tests/test_fsdp2_tensor.py::test_parity_on_two_axes[{'sequence_parallel': True, 'activation_checkpointing': 'selective', 'reshard_after_forward': False}-Case(model_type='llama', tied=True, layers=None, steps=3, sequences=24, microbatches=2, ragged=True, empty=0, shares=None, max_norm=0.5, norm_type=2.0, frozen=(), optimizer=OptimizerConfig(name='AdamW', lr=0.01, weight_decay=0.1, no_decay=None, options={}, groups=[]), rates=(), dtype='float64', in_float32=(), eval_after=True, unshard_after=True, schedule=None, route=None, adapter=None)]",
    kind="a sound plan is refused before gradients are reduced",
)
_bug(
    "loops_by_hand_take_wrong_plans",
    "meshwright_fsdp2.functions",
    "            tensor_parallel.check_by_hand(model)\n",
    "            pass\n",
    f"{_BY_HAND}[function-{{}}]",
    kind="a plan that forgets a parameter trains in a loop by hand",
)
_bug(
    "functions_of_plans_get_a_model",
    "meshwright.parallel.tensor.plan",
    "found = found(model) if takes_model else found()",
    "found = found(model)",
    f"{_TP_PLAN}::test_an_import_path_of_a_dict_or_of_a_function",
    kind="a function without arguments is called with one",
)
_bug(
    "inner_plans_are_not_read",
    "meshwright.parallel.tensor.plan",
    "reversed(list(model.named_modules()))",
    'reversed([("", model)])',
    f"{_TP_PLAN}::test_plans_of_the_class_and_of_inner_models_are_merged",
    kind="the plan of the model inside is lost",
)

# -- parallel.context

_bug(
    "tail_of_another_rank",
    "meshwright.parallel.context.positions",
    "return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)",
    "return torch.cat([chunks[rank], chunks[ranks + rank]], dim)",
    "tests/parallel/test_context_parallel.py::test_each_rank_has_a_chunk_of_the_head_and_one_of_the_tail[2]",
    kind="ranks disagree on who has which positions",
)
_bug(
    "queries_begin_elsewhere",
    "meshwright.parallel.context.positions",
    "return self.rank * chunk, (2 * self.size - 1 - self.rank) * chunk",
    "return self.rank * chunk, (self.size + self.rank) * chunk",
    _CP,
    kind="the causal mask of the second chunk is that of another",
)
_bug(
    "keys_of_own_queries",
    "meshwright.parallel.context.positions",
    "return reduce_scatter(parts, 0, ctx.group)[0], None",
    "return parts[dist.get_rank(ctx.group)], None",
    _CP,
    kind="gradients of keys are those of the rank's own queries",
)
_bug(
    "heads_in_another_order",
    "meshwright.parallel.context.positions",
    "return torch.cat(received.unbind(0), 2)",
    "return torch.cat(received.flip(0).unbind(0), 2)",
    _ULYSSES,
    kind="heads come back in the order of other ranks",
)
_bug(
    "positions_begin_at_zero",
    "meshwright.parallel.context.parallel",
    '"position_ids": self.own(whole.expand(count, length)),',
    '"position_ids": whole.expand(count, length)[:, : length // self.share.size],',
    _CP,
    kind="position ids do not follow the division of the sequence",
)
_bug(
    "labels_shifted_within_parts",
    "meshwright.parallel.context.parallel",
    "TARGETS: self.own(targets(labels)),",
    "TARGETS: targets(self.own(labels)),",
    _CP,
    kind="labels are shifted after the sequence was divided",
)
_bug(
    "documents_under_a_causal_mask",
    "meshwright.parallel.context.parallel",
    "        is_causal = is_causal and not is_documents\n",
    "",
    f"{_DOCUMENTS}[llama-documents-ulysses]",
    kind="documents of a row see each other where the sequence is divided",
)
_bug(
    "padding_is_attended",
    "meshwright.parallel.context.parallel",
    "ids.new_empty(int(mask is not None and not bool(mask.all())))",
    "ids.new_empty(0)",
    f"{_DOCUMENTS}[gpt2-padded-allgather]",
    kind="the attention mask of the batch is ignored",
)
_bug(
    "whole_windows",
    "meshwright.parallel.context.parallel",
    "is_whole and (local_size is None or kv_length < local_size)",
    "is_whole",
    "tests/parallel/test_context_parallel.py::test_parity_of_architectures[mistral-cp2-ulysses]",
    kind="a sliding window is taken for plain causal attention",
)
_bug(
    "unknown_tensors_stay_whole",
    "meshwright.parallel.context.parallel",
    "            if name not in _DIVIDED:",
    "            if False:",
    "tests/parallel/test_context_parallel.py::test_what_cannot_be_divided_in_a_batch_is_refused",
    kind="what is not known to be divided is passed on as it is",
)

# -- parallel.expert

_bug(
    "routing_weights_forgotten",
    "meshwright.parallel.expert.parallel",
    "weighted = placed.view(tokens, choices, -1) * weights_TK[..., None]",
    "weighted = placed.view(tokens, choices, -1) * weights_TK.mean()",
    f"{_EXPERTS}::test_parity_of_types_that_differ[{{'ep_size': 4}}-qwen3_moe]",
    kind="answers of experts are not weighed by the router",
)
_bug(
    "gradients_of_experts_averaged",
    "meshwright.parallel.expert.parallel",
    "return all_to_all(grad, ctx.group, ctx.receives, ctx.sends), None, None, None",
    "return all_to_all(grad / dist.get_world_size(ctx.group), ctx.group, ctx.receives, ctx.sends), None, None, None",
    f"{_EXPERTS}::test_parity_of_types_that_differ[{{'ep_size': 4}}-qwen3_moe]",
    kind="gradients of experts are averaged over the ranks that share them",
)
_bug(
    "tokens_of_tp_come_twice",
    "meshwright.parallel.expert.parallel",
    'self._tp_group = mesh.group("tp") if mesh.degrees.tp > 1 else None',
    "self._tp_group = None",
    f"{_EXPERTS}::test_parity_of_types_that_differ[{{'ep_size': 2, 'tp_size': 2}}-qwen3_moe]",
    kind="experts train on the tokens of all ranks that have the same ones",
)

# -- checkpoint

_bug(
    "checksums_unread",
    "meshwright.checkpoint.manifest",
    "        if stored != manifest.files[name]:\n            raise changed(directory, name)\n\n\ndef read_verified",
    "        if stored.size != manifest.files[name].size:\n            raise changed(directory, name)\n\n\n"
    "def read_verified",
    f"{_FAULTS}::test_what_is_not_whole_is_named_and_an_older_one_is_taken[a bit is flipped]",
    kind="a checkpoint is loaded without a look at its checksums",
)
_bug(
    "manifest_without_a_checksum",
    "meshwright.checkpoint.manifest",
    "        if not is_whole or checksum != digest(content):",
    "        if not is_whole and checksum != digest(content):",
    "tests/checkpoint/test_checkpoint_faults.py::test_what_is_not_whole_is_named_and_an_older_one_is_taken[the manifest is altered]",
    kind="the manifest itself has no checksum",
)
_bug(
    "every_manifest_is_altered",
    "meshwright.checkpoint.manifest",
    '        checksum = content.pop("sha256")\n        if not is_whole or checksum != digest(content):',
    '        digest = content.pop("sha256")\n        if not is_whole or digest != digest(content):',
    "tests/checkpoint/test_checkpoint_directory.py::test_retention_counts_whole_checkpoints_alone_and_removes_no_other",
    kind="a name hides the function of that name, and the error is taken for damage",
)
_bug(
    "files_outside_of_the_checkpoint",
    "meshwright.checkpoint.manifest",
    'or path.is_absolute() or ".." in path.parts',
    "or path.is_absolute()",
    "tests/checkpoint/test_checkpoint_formats.py::test_a_manifest_names_files_of_the_checkpoint_alone[../outside]",
    kind="a file names others beside its directory",
)
_bug(
    "removed_before_the_new_is_there",
    "meshwright.checkpoint.directory",
    "        shutil.rmtree(old, ignore_errors=True)\n        final.rename(old)\n",
    "        shutil.rmtree(final)\n",
    "tests/checkpoint/test_checkpoint_directory.py::test_a_failed_rename_leaves_the_old_checkpoint_under_its_name",
    kind="the old checkpoint is removed before the new one has its name",
)
_bug(
    "named_before_it_is_whole",
    "meshwright.checkpoint.directory",
    '    writing = beside(final, "writing")\n    try:\n        recover(final)\n',
    "    writing = final\n    try:\n",
    "tests/checkpoint/test_checkpoint_directory.py::test_a_crash_at_any_instant_of_a_save_leaves_the_old_or_the_new_checkpoint"
    "[before]",
    kind="a checkpoint is written in place",
)
_bug(
    "retention_takes_one_too_many",
    "meshwright.checkpoint.directory",
    "        if kept > keep_last:",
    "        if kept >= keep_last:",
    f"{_FAULTS}::test_retention[1-2-kept1]",
    kind="retention deletes the newest checkpoint",
)
_bug(
    "retention_after_a_rollback",
    "meshwright.checkpoint.directory",
    "if step <= newest and _is_whole(path)]",
    "if _is_whole(path)]",
    "tests/checkpoint/test_checkpoint_directory.py::test_retention_never_removes_what_was_just_saved_nor_what_is_of_later_steps",
    kind="after going back, new checkpoints are deleted as soon as they are written",
)
_bug(
    "torn_ones_count",
    "meshwright.checkpoint.directory",
    "if step <= newest and _is_whole(path)]",
    "if step <= newest]",
    "tests/checkpoint/test_checkpoint_directory.py::test_retention_counts_whole_checkpoints_alone_and_removes_no_other",
    kind="a torn checkpoint counts, and the last whole one is deleted",
)
_bug(
    "rate_frozen_after_loading",
    "meshwright.checkpoint.schedule",
    '_OF_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr"}',
    '_OF_GROUPS = {"base_lrs": "lr", "_last_lr": "lr"}',
    "tests/checkpoint/test_checkpoint_schedule.py::test_each_group_goes_on_with_its_own_rate[[0, 1]-lambda]",
    kind="after resume the learning rate follows from the one that was reached",
)
_bug(
    "a_row_is_written_by_nobody",
    "meshwright.tensors.ownership",
    "start, end = size * index // count, size * (index + 1) // count",
    "start, end = size // count * index, size // count * (index + 1)",
    "tests/checkpoint/test_checkpoint_ownership.py::test_every_element_is_written_once_by_a_rank_that_has_it",
    kind="what the ranks do not divide is saved by none of them",
)
_bug(
    "read_from_the_first_row",
    "meshwright.checkpoint.payload",
    "first = self.offsets[0] - self.stored.offsets[0] if self.sizes else 0",
    "first = 0",
    f"{_LAYOUTS}[single-fsdp2-3]",
    kind="every rank reads the first rows of a tensor",
)
_bug(
    "step_counters_lost",
    "meshwright.checkpoint.values",
    '            found.values.update(decoded(content["values"]))\n',
    "",
    f"{_LAYOUTS}[single-ddp]",
    kind="the optimizer counts its steps anew",
)
_bug(
    "failed_saves_are_forgotten",
    "meshwright.checkpoint.checkpointer",
    "        error, self._error = self._error, None\n",
    "        error, self._error = None, None\n",
    f"{_FAULTS}::test_a_full_disk_stops_the_run_or_not_and_harms_no_checkpoint[stop-True]",
    kind="training goes on though nothing could be saved",
)
_bug(
    "random_state_of_the_first_rank",
    "meshwright.checkpoint.loading",
    "random_to_load(stored, dist.get_rank())",
    "random_to_load(stored, 0)",
    f"{_FAULTS}::test_random_generators_go_on_on_the_same_mesh",
    kind="all ranks draw the same random numbers after resume",
)
_bug(
    "export_in_another_dtype",
    "meshwright.checkpoint.export",
    "return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype",
    "return self._dtype if self._dtype is None and dtype.is_floating_point else dtype",
    "tests/model/test_export.py::test_weights_are_converted_and_files_bounded",
    kind="weights are exported in the wrong dtype",
)
_bug(
    "exported_before_it_is_described",
    "meshwright.checkpoint.export",
    "    yield writing\n    if first:\n        writing.rename(output.resolve())\n",
    "    if first:\n        writing.rename(output.resolve())\n    yield output.resolve()\n",
    "tests/model/test_export.py::test_an_export_that_is_cut_off_leaves_nothing_under_its_name",
    kind="an export has its name before it is whole",
)
_bug(
    "saved_while_it_trains",
    "meshwright.checkpoint.saving",
    'each.to("cpu", copy=True, memory_format=torch.contiguous_format)',
    'each.to("cpu", copy=False)',
    f"{_FAULTS}::test_an_asynchronous_checkpoint_is_of_the_step_it_was_asked_for",
    kind="a checkpoint holds weights of a later step",
)
_bug(
    "unsigned_ones_pass",
    "meshwright.checkpoint.manifest",
    "    if key is not None and not key.has_signed(version, checksum, signature):",
    "    if key is not None and signature is not None and not key.has_signed(version, checksum, signature):",
    "tests/checkpoint/test_checkpoint_verify.py::test_a_foreign_one_is_not_passed_over_as_a_torn_one_is",
    kind="a checkpoint without a signature is loaded where a key is asked for",
)
_bug(
    "retention_of_foreign_ones",
    "meshwright.checkpoint.directory",
    "            if not is_foreign(LocalFolder(path, access)):\n                shutil.rmtree(path, ignore_errors=True)",
    "            shutil.rmtree(path, ignore_errors=True)",
    "tests/checkpoint/test_checkpoint_verify.py::test_what_is_foreign_is_never_removed_nor_replaced",
    kind="what another has signed is removed with the leftovers",
)
_bug(
    "half_an_object_appears",
    "meshwright.checkpoint.remote",
    "            with suppress(Exception):\n                file.discard()\n            file.closed = True\n            raise",
    "            file.close()\n            raise",
    "tests/checkpoint/test_remote_checkpoints.py::test_objects_are_read_in_parts_and_a_write_that_fails_leaves_none",
    kind="a file whose writing has failed is closed, which makes a half of it appear",
)

# -- what an export has

_EXPORT = "tests/model/test_export.py"
_bug(
    "the_configuration_says_which_weights_are_one",
    "meshwright.model.ties",
    "    if pairs and all(is_one is wanted for is_one in pairs):\n",
    "    if False:\n",
    f"{_EXPORT}::test_a_head_that_code_unties_or_ties_is_exported_so[True-fsdp2]",
    f"{_EXPORT}::test_a_run_that_begins_with_a_checkpoint_keeps_head_and_files",
    kind="a trained head is lost on export",
)
_bug(
    "tied_by_class_whatever_the_checkpoint_holds",
    "meshwright.checkpoint.export",
    "            if name in kinds or (name not in tied and not is_left_out_of_files(self._model, name))\n",
    "            if name not in tied and not is_left_out_of_files(self._model, name)\n",
    f"{_EXPORT}::test_one_of_several_tied_weights_is_exported_where_it_has_values_of_its_own",
    kind="a trained head is lost on export",
)
_bug(
    "generation_config_of_the_class",
    "meshwright.checkpoint.saving",
    "            if generation is not None:\n",
    "            if False:\n",
    f"{_EXPORT}::test_what_plain_transformers_loads_is_what_was_trained[plain-Python]",
    kind="a chat model loses its stop tokens",
)
_bug(
    "modules_that_hold_nothing_are_taken",
    "meshwright.manager.start",
    "    _TAKEN.update(each for each in modules if any(True for _ in (*each.parameters(), *each.buffers())))\n",
    "    _TAKEN.update(modules)\n",
    "tests/model/test_taken_models.py::test_models_that_share_modules_without_parameters_have_managers_of_their_own",
    kind="a second model of a type is refused in the same process",
)
_bug(
    "files_that_are_links_are_lost",
    "meshwright.model.base_files",
    '    allowed = {directory.resolve(), (directory / "config.json").resolve().parent}\n',
    "    allowed = {directory.resolve()}\n",
    f"{_EXPORT}::test_files_of_a_directory_of_links_are_kept",
    kind="licence, processors and code of the base are lost on export",
)
_bug(
    "files_in_folders_are_lost",
    "meshwright.model.base_files",
    'sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")])',
    "sorted(directory.iterdir())",
    "tests/model/test_adapter_runs.py::test_a_merged_adapter_keeps_all_files_of_its_tokenizer",
    kind="licence, processors and code of the base are lost on export",
)
_bug(
    "tensors_that_are_gone_are_held",
    "meshwright.model.operators",
    "        self._saved.pop(key, None)\n",
    "",
    "tests/model/test_activation_budget.py::test_what_blocks_hold_is_foreseen_to_the_byte_and_changes_no_bit[rwkv]",
    kind="a budget of activations ends in a KeyError",
)
_bug(
    "adapters_without_a_known_base_are_a_whole_model",
    "meshwright.checkpoint.adapter_files",
    '    return any(name.rpartition("/")[2] == ADAPTER_CONFIG for _, name in stored.described)\n',
    "    return stored.manifest.base is not None\n",
    "tests/model/test_adapter_files.py::test_a_model_whose_base_nobody_knows_is_saved_whole_and_leaves_as_adapter_or_merged",
    kind="an adapter that was trained cannot be saved",
)
_bug(
    "adapters_fill_a_cache",
    "meshwright.step.forward_options",
    "        base = _below_adapters(model)\n",
    "        base = model\n",
    f"{_EXPORT}::test_an_adapter_of_a_type_that_trains_without_a_cache_alone_is_merged",
    kind="a training step fills a key-value cache",
)
_bug(
    "files_beside_weights_are_not_saved",
    "meshwright.checkpoint.saving",
    "            found |= without_replaced(kept_files(self._model), found)\n",
    "",
    f"{_EXPORT}::test_what_plain_transformers_loads_is_what_was_trained[plain-run file]",
    kind="licence, processors and code of the base are lost on export",
)

# -- data

_bug(
    "cache_without_the_tokenizer",
    "meshwright.data.entry",
    '        "tokenizer": tokenizer_key(tokenizer_dir),\n',
    "",
    f"{_DATA}::test_given_tokenizer_is_used_and_its_change_makes_a_new_entry",
    kind="the key of the cache does not know the tokenizer",
)
_bug(
    "cache_without_the_fraction",
    "meshwright.data.entry",
    '        "fraction": how.fraction,\n',
    "",
    f"{_SOURCES}::test_what_is_held_out_of_a_source_is_part_of_its_entry",
    kind="the key of the cache does not know what is held out",
)
_bug(
    "cache_without_the_options",
    "meshwright.data.entry",
    '        "options": how.options,\n',
    "",
    f"{_SOURCES}::test_what_is_made_of_records_is_part_of_the_entry[changes1]",
    kind="the key of the cache does not know what becomes of long documents",
)
_bug(
    "a_corpus_that_changes",
    "meshwright.data.entry",
    "        raise\n    source.check_unchanged()\n",
    "        raise\n",
    f"{_SOURCES}::test_a_file_that_changes_while_it_is_tokenized_leaves_nothing_in_the_cache[9]",
    kind="a file that is still written is kept as the corpus",
)
_bug(
    "an_unfinished_file_is_called_broken",
    "meshwright.data.entry",
    "        source.check_unchanged()\n        raise\n",
    "        raise\n",
    f"{_SOURCES}::test_a_file_that_changes_while_it_is_tokenized_leaves_nothing_in_the_cache[1]",
    kind="an error names what follows from another one",
)
_bug(
    "damaged_entries_are_used",
    "meshwright.data.entry",
    "        if not _sizes(directory).items() >= meta.sizes.items():",
    "        if False:",
    f"{_SOURCES}::test_an_entry_that_has_lost_what_says_which_tokens_are_learnt_is_made_anew",
    kind="a cache entry that lacks something is used",
)
_bug(
    "a_cut_file_is_taken_for_whole",
    "meshwright.data.reading.opening",
    """                if self._frame is not None:
                    raise EOFError("a frame of Zstandard has no end")
""",
    "",
    f"{_SOURCES}::test_a_cut_file_is_not_taken_for_whole[.zst]",
    kind="the end of a file that was cut off passes for its end",
)
_bug(
    "elements_end_with_what_was_read",
    "meshwright.data.reading.json_array",
    "_NEAR_THE_END = 16",
    "_NEAR_THE_END = 0",
    f"{_SOURCES}::test_an_array_is_read_in_pieces_of_any_size",
    kind="what lies across the edge of two reads is taken for broken",
)
_bug(
    "lines_are_not_counted",
    "meshwright.data.reading.json_array",
    "        self.line += ",
    "        self.line += 0 * ",
    f"{_SOURCES}::test_places_are_the_lines_where_records_begin",
    kind="an error names the wrong line",
)
_bug(
    "ends_stay_where_they_were",
    "meshwright.data.documents",
    "            self._ends.put(place, piece - (end - begin))\n",
    "            self._ends.put(place, piece)\n",
    f"{_SOURCES}::test_documents_that_are_taken_out_again_take_along_what_belongs_to_them",
    kind="bounds are not moved with what they bound",
)
_bug(
    "half_of_a_column_is_whole_numbers",
    "meshwright.data.documents",
    'if values.dtype.kind == "f" and self.file.dtype.kind != "f":',
    "if False:",
    f"{_SOURCES}::test_columns_go_with_their_documents_and_have_one_type_in_all_sources",
    kind="numbers lose what is behind the point",
)
_bug(
    "a_pair_is_parted",
    "meshwright.data.encoding.tokenizing",
    "nearest[side] = (place, len(kept), len(kept) + len(made))",
    "nearest[side] = (place, len(kept), len(kept) + 1)",
    f"{_SOURCES}::test_the_two_of_a_pair_stay_together[1e-09]",
    kind="of what belongs together a part is moved",
)
_bug(
    "a_side_by_what_else_is_said",
    "meshwright.data.encoding.tokenizing",
    "for name in sorted(names & value.keys())",
    "for name in sorted(value.keys())",
    f"{_SOURCES}::test_the_two_of_a_pair_stay_together[0.5]",
    kind="copies of an example are on both sides",
)
_bug(
    "half_an_answer_is_taken",
    "meshwright.data.encoding.worker",
    "    if len(content) < count:\n        raise EOFError\n",
    "",
    f"{_SOURCES}::test_half_an_answer_is_none",
    kind="a process that dies while it answers is not told of",
)
_bug(
    "plain_text_has_no_field",
    "meshwright.data.reading.sources",
    'yield {self.config.fields.get("text", "text"): value["text"]}, where',
    "yield value, where",
    f"{_SOURCES}::test_a_text_file_beside_others_has_its_text_where_they_have_theirs",
    kind="text files beside those with fields are refused",
)
_bug(
    "tasks_are_taken_as_they_end",
    "meshwright.data.encoding.tokenizing",
    "            while pending:\n                yield pending.popleft().result()\n",
    "            while pending:\n                yield pending.pop().result()\n",
    f"{_DATA}::test_documents_keep_their_order_over_many_batches",
    kind="results of several workers are in another order",
)
_bug(
    "sources_in_any_order",
    "meshwright.data.prepare",
    '" ".join(source.fingerprint for source in sources)',
    '" ".join(sorted(source.fingerprint for source in sources))',
    f"{_SOURCES}::test_the_order_of_sources_is_in_the_fingerprint_and_one_source_has_its_own",
    kind="a fingerprint does not know the order",
)
_bug(
    "a_set_without_its_held_out_part",
    "meshwright.data.prepare",
    "[entry_of(each, 0.0) for each in sources]",
    "[entry_of(each, config.eval_fraction) for each in sources]",
    f"{_SOURCES}::test_evaluation_sets_are_whole_and_may_take_the_place_of_what_is_held_out",
    kind="a set is evaluated in part",
)
_bug(
    "the_first_split_of_a_dataset",
    "meshwright.data.reading.hub",
    "    return found[config.split]\n",
    "    return next(iter(found.values()))\n",
    f"{_SOURCES}::test_a_saved_dataset_has_the_tokens_of_the_same_rows_in_a_file",
    kind="an option is read and not used",
)
_bug(
    "order_off_by_one",
    "meshwright.data.rows.order",
    "return position + (step - first) * self.batch_size",
    "return position + (step - first) * self.batch_size + (step > first)",
    f"{_DATA}::test_order_stays_what_it_was_in_earlier_releases",
    kind="a step begins one sequence late",
)
_bug(
    "epochs_repeat",
    "meshwright.data.rows.order",
    "seed=self.seed, epoch=epoch)",
    "seed=self.seed, epoch=0)",
    f"{_DATA}::test_epochs_and_seeds_differ",
    kind="every epoch has the order of the first",
)
_bug(
    "one_batch_for_all",
    "meshwright.data.rows.feed",
    "shares = np.arange(len(units)).reshape(place.data_size, -1)[place.data_rank]",
    "shares = np.arange(len(units)).reshape(place.data_size, -1)[0]",
    f"{_DATA}::test_ranks_share_the_same_global_batch_at_any_size",
    kind="all ranks train on the same batch",
)
_bug(
    "evaluated_twice",
    "meshwright.data.rows.feed",
    "masked=numbers >= count)",
    "masked=numbers < 0)",
    f"{_DATA}::test_evaluation_covers_each_sequence_once_and_pads_with_masked_ones",
    kind="sequences that fill up an evaluation count",
)
_bug(
    "documents_see_documents",
    "meshwright.data.rows.rows",
    "positions[layout.at] = layout.places",
    "positions[layout.at] = layout.at[1]",
    f"{_ROWS_OF_RUNS}::test_packed_rows_hold_each_document_whole_with_positions_and_labels_of_its_own",
    kind="positions of packed documents do not restart",
)
_bug(
    "padding_goes_on",
    "meshwright.data.rows.rows",
    "- layout.used[:, None]",
    "+ 0 * layout.used[:, None]",
    f"{_ROWS_OF_RUNS}::test_packed_rows_hold_each_document_whole_with_positions_and_labels_of_its_own",
    kind="padding counts as a part of the last document",
)
_bug(
    "first_tokens_are_learnt",
    "meshwright.data.rows.layout",
    "learnt = self.places > 0",
    "learnt = self.places >= 0",
    f"{_ROWS_OF_RUNS}::test_packed_rows_hold_each_document_whole_with_positions_and_labels_of_its_own",
    kind="the first token of a document is predicted from the one before it in the row",
)
_bug(
    "everything_is_learnt",
    "meshwright.data.rows.layout",
    "learnt &= self._documents.labelled[self._source]",
    "learnt &= self._documents.labelled[self._source] | True",
    f"{_ROWS_OF_RUNS}::test_packed_rows_hold_each_document_whole_with_positions_and_labels_of_its_own",
    kind="questions are learnt like answers",
)
_bug(
    "worst_fit",
    "meshwright.data.rows.best_fit",
    "at = bisect_left(self.rooms, length)",
    "at = max(bisect_left(self.rooms, length), len(self.rooms) - 1)",
    f"{_ROWS_OF_RUNS}::test_rows_are_those_of_best_fit_decreasing_by_the_book",
    kind="documents go into the row with the most room",
)
_bug(
    "lengths_of_each_rank",
    "meshwright.data.rows.feed",
    "widths = _widths(lengths[sorted_].reshape(len(parts), -1).max(1), rows.seq_len, place)",
    "widths = _widths(lengths[parts].max(1), rows.seq_len, place)",
    f"{_ROWS_OF_RUNS}::test_microbatches_of_one_number_have_one_length_on_all_ranks",
    kind="data ranks pad to lengths of their own",
)
_bug(
    "stages_get_several_lengths",
    "meshwright.data.rows.feed",
    "    if place.one_shape:",
    "    if False:",
    f"{_ROWS_OF_RUNS}::test_microbatches_of_one_number_have_one_length_on_all_ranks",
    kind="microbatches of a pipeline differ in length",
)
_bug(
    "pairs_are_parted",
    "meshwright.data.rows.feed",
    "indices = (units[:, None] * rows.group + np.arange(rows.group)).reshape(-1)",
    "indices = (units[:, None] + len(rows) // rows.group * np.arange(rows.group)).reshape(-1)",
    f"{_ROWS_OF_RUNS}::test_pairs_stay_together_in_every_order",
    kind="chosen answers are beside rejected ones of others",
)
_bug(
    "sources_share_an_order",
    "meshwright.data.rows.feed",
    'of=f"source {number}"',
    'of=f"source {epoch - epoch}"',
    f"{_ROWS_OF_RUNS}::test_sources_are_each_in_an_order_of_their_own",
    kind="sources are read in one order, side by side",
)
_bug(
    "each_block_begins_anew",
    "meshwright.data.rows.mixture",
    "earlier[mine] = count + np.arange(len(mine))",
    "earlier[mine] = np.arange(len(mine))",
    f"{_ROWS_OF_RUNS}::test_places_of_a_mixture_are_computed_alone",
    kind="a source in a mixture repeats its first rows in each block",
)
_bug(
    "blocks_of_a_stream_in_order",
    "meshwright.data.rows.stream",
    "epoch=number, of=",
    "epoch=0, of=",
    f"{_STREAMED}::test_each_epoch_of_a_stream_has_every_document_once_in_another_order",
    kind="every block of a stream has the order of the first",
)
_bug(
    "a_stream_goes_on_one_block_later",
    "meshwright.data.rows.stream",
    "return self._state() if block is None else block.state",
    "return self._state()",
    f"{_STREAMED}::test_a_stream_goes_on_from_any_step_on_another_mesh[documents]",
    kind="a run that goes on skips what is left of a block",
)
_bug(
    "a_state_is_taken_unseen",
    "meshwright.data.rows.stream",
    "                self._iterator = iter(self._loader)\n            except",
    "            except",
    f"{_STREAMED}::test_a_state_of_another_source_is_told[of a dataset]",
    kind="an error of a library in place of what the user can do",
)
_bug(
    "rows_of_a_stream_break_as_they_may",
    "meshwright.data.reading.hub",
    '    except Exception as error:  # the library raises whatever its readers and downloads meet\n        raise DataError(f"the dataset',
    '    except OSError as error:\n        raise DataError(f"the dataset',
    f"{_STREAMED}::test_a_dataset_that_is_broken_further_on_is_told",
    kind="an error of a library in place of what the user can do",
)
_bug(
    "a_second_epoch_begins_in_the_middle",
    "meshwright.data.rows.record_loader",
    "self._row, self._dataset = 0, hub.open_dataset(self._config, streaming=True)",
    "self._row = 0",
    f"{_STREAMED}::test_a_dataset_is_streamed",
    kind="a resumed stream begins each epoch where it was resumed",
)
_bug(
    "streams_draw_numbers_of_the_run",
    "meshwright.data.rows.record_loader",
    "own = torch.Generator()",
    "own = None",
    f"{_STREAMED}::test_random_numbers_of_a_run_stay_as_they_are",
    kind="dropout differs after a resume, for a reader has drawn",
)
_bug(
    "granite_holds_a_cache",
    "meshwright.step.forward_options",
    "    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):",
    "    if False:",
    "tests/parallel/test_apart.py::test_models_that_keep_documents_apart_are_taken[granitemoe]",
    kind="a cache of keys hides from a model that documents share a row",
)
_bug(
    "leaks_are_let_pass",
    "meshwright.train.run.apart",
    "    if not moved <= limit * measure:",
    "    if not moved <= measure + limit:",
    "tests/parallel/test_apart.py::test_models_whose_documents_see_each_other_are_refused[torch.float32-falcon_h1]",
    kind="a model that lets a little through is taken",
)
_bug(
    "packing_drops_the_last",
    "meshwright.data.rows.rows",
    "self._count = len(tokens) // seq_len",
    "self._count = max(0, len(tokens) - 1) // seq_len",
    f"{_DATA}::test_sequences_are_the_stream_cut_without_its_tail",
    kind="packing drops the last sequence",
)
_bug(
    "documents_run_together",
    "meshwright.data.encoding.drafts",
    "        after = self.after if draft.closed and ids[-1:] != self.after[-1:] else []",
    "        after: list[int] = []",
    f"{_DATA}::test_stream_holds_each_document_and_an_eos",
    kind="no eos token stands between documents",
)
_bug(
    "mostly_held_out",
    "meshwright.data.split",
    'return "held_out" if place < fraction else "train"',
    'return "held_out" if place > fraction else "train"',
    f"{_DATA}::test_split_holds_out_about_the_fraction",
    kind="what is to be held out is trained on",
)
_bug(
    "both_processes_build",
    "meshwright.data.cache",
    "            entry = load(directory)  # another process may have built it meanwhile\n",
    "",
    f"{_DATA}::test_of_two_processes_one_builds_and_both_get_the_result",
    kind="a check is not made again under the lock",
)
_bug(
    "byte_order_marks_are_text",
    "meshwright.data.reading.readers",
    'return content.decode("utf-8-sig")',
    'return content.decode("utf-8")',
    f"{_DATA}::test_text_files_are_read_exactly_apart_from_a_byte_order_mark",
    kind="marks of files are trained on",
)

# -- train

_bug(
    "last_step_not_due",
    "meshwright.train.loop.options",
    "return done == steps or (every is not None and done % every == 0)",
    "return every is not None and done % every == 0",
    f"{_TRAIN}::test_observers_see_every_step_while_they_are_registered",
    kind="nothing is evaluated or saved after the last step",
)
_bug(
    "dropout_of_the_first_step",
    "meshwright.train.loop.batches",
    "spawn_key=(step, data_rank)",
    "spawn_key=(0, data_rank)",
    "tests/train/test_train.py::test_each_step_and_each_data_rank_has_random_numbers_of_its_own",
    kind="every step draws the same dropout",
)
_bug(
    "one_dropout_for_all_ranks",
    "meshwright.train.loop.ahead",
    "step_seed(seed, step, self._manager.mesh.data_rank)",
    "step_seed(seed, step, 0)",
    "tests/train/test_train.py::test_each_step_and_each_data_rank_has_random_numbers_of_its_own",
    kind="ranks with other data draw the same dropout",
)
_bug(
    "epochs_are_not_told",
    "meshwright.train.loop.batches",
    "set_epoch(self._number)",
    "set_epoch(0)",
    f"{_FIT}::test_a_step_never_reaches_over_the_end_of_a_pass_and_each_pass_is_told_its_number",
    kind="each epoch has the order of the first",
)
_bug(
    "a_pass_begins_again",
    "meshwright.train.loop.batches",
    "step // each, step // each * each",
    "step // each, step",
    f"{_FIT}::test_a_run_goes_on_at_the_microbatch_that_comes_next[sampler]",
    kind="a run that goes on trains once more on the batches of its epoch",
)
_bug(
    "a_state_that_lives_on",
    "meshwright.train.loop.batches",
    "deepcopy(find())",
    "find()",
    f"{_FIT}::test_a_run_goes_on_at_the_microbatch_that_comes_next[live]",
    kind="what a checkpoint tells of a loader changes before it is saved",
)
_bug(
    "who_fails_alone_ends_alone",
    "meshwright.train.loop.agreed",
    "    if world.reduce_ints([error is not None])[0]:\n        raise_on_all(world, error, kind, what)\n",
    "    if error is not None:\n        raise error\n",
    f"{_FIT}::test_what_fails_on_one_rank_ends_all_of_them[held out-BatchError-the microbatches of held_out cannot be "
    "drawn: ZeroDivisionError: no such row]",
    kind="ranks wait for one whose held-out data could not be read",
)
_bug(
    "the_end_of_a_pass_hides_an_error",
    "meshwright.train.loop.batches",
    "    if failed or count in (0, world.size):\n",
    "    if count in (0, world.size):\n",
    f"{_FIT}::test_what_fails_on_one_rank_ends_all_of_them[drawing-BatchError-the microbatches of step 3 cannot be "
    "drawn: ZeroDivisionError: no such row]",
    kind="an error of a dataset is told as batches that end too early",
)
_bug(
    "a_step_of_warm_up_too_many",
    "meshwright.train.run.run_sections",
    "math.ceil(Fraction(str(self.warmup_ratio)) * steps)",
    "math.ceil(self.warmup_ratio * steps)",
    f"{_FIT_RUN}::test_a_share_of_warm_up_is_rounded_up_as_it_is_written[0.07-100-7]",
    kind="a share of steps is rounded up for what floating numbers add to it",
)
_bug(
    "patience_is_forgotten",
    "meshwright.train.loop.watch",
    'int(seen.get("waited", 0))',
    "0",
    f"{_FIT}::test_only_a_loss_that_is_lower_by_enough_renews_patience[values1-best1-True]",
    kind="a run that goes on has all of its patience again",
)
_bug(
    "any_gain_renews_patience",
    "meshwright.train.loop.watch",
    "value < self._lowest - self._stopping.min_delta",
    "value < self._lowest",
    f"{_FIT}::test_only_a_loss_that_is_lower_by_enough_renews_patience[values2-best2-True]",
    kind="min_delta is ignored",
)
_bug(
    "the_best_is_forgotten",
    "meshwright.train.loop.watch",
    "self._best = sorted((float(value), int(step)) for value, step in best)",
    "self._best: list[tuple[float, int]] = []",
    f"{_FIT}::test_only_a_loss_that_is_lower_by_enough_renews_patience[values1-best1-True]",
    kind="a run that goes on takes its next evaluation for the best",
)
_bug(
    "the_best_is_deleted",
    "meshwright.checkpoint.directory",
    "(step in best or (keep_every is not None and step % keep_every == 0))",
    "(keep_every is not None and step % keep_every == 0)",
    f"{_FIT}::test_the_best_checkpoints_are_saved_and_never_removed_also_after_an_interruption",
    kind="retention deletes the best checkpoint",
)
_bug(
    "the_worst_is_kept",
    "meshwright.checkpoint.directory",
    "    found.sort(key=lambda each: each[:2])\n",
    "    found.sort(key=lambda each: each[:2], reverse=True)\n",
    f"{_FIT}::test_the_best_checkpoints_are_saved_and_never_removed_also_after_an_interruption",
    kind="a higher loss is taken for the better one",
)
_bug(
    "every_clock_counts",
    "meshwright.train.loop.fit",
    "after is not None and self.world.rank == 0 and",
    "after is not None and",
    f"{_FIT}::test_a_checkpoint_is_saved_when_the_clock_of_the_first_rank_says_so",
    kind="checkpoints are saved when any clock says so",
)
_bug(
    "stopped_runs_train_on",
    "meshwright.train.loop.fit",
    "            if self.watch.is_exhausted:\n                # It was",
    "            if False:\n                # It was",
    f"{_FIT}::test_a_run_stops_early_on_any_layout_and_remembers_its_patience",
    kind="a run that had stopped early trains on when it is started again",
)
_bug(
    "epochs_are_cut_short",
    "meshwright.train.run.preflight",
    "math.ceil(Fraction(str(config.epochs))",
    "math.floor(Fraction(str(config.epochs))",
    f"{_FIT_RUN}::test_an_epoch_has_each_row_once_and_the_last_step_is_whole[1-4-3]",
    kind="the last rows of an epoch are never trained on",
)
_bug(
    "a_share_of_warm_up_is_another_schedule",
    "meshwright.train.run.preflight",
    '"schedule": schedule.model_dump(exclude={"warmup_ratio"}),',
    '"schedule": config.schedule.model_dump(),',
    f"{_FIT_RUN}::test_epochs_and_a_share_of_warm_up_are_the_steps_that_they_come_to",
    kind="what is the same schedule in other words is refused, and another taken",
)
_bug(
    "ranks_add_up_the_reference",
    "meshwright.train.run.columns",
    "    if not manager.mesh.leads_data:\n        found.zero_()\n",
    "",
    f"{_FIT_RUN}::test_a_reference_is_the_model_at_the_beginning_also_of_a_run_that_goes_on[fsdp2-{{'tp_size': 2}}-2]",
    kind="what ranks have alike is added up",
)
_bug(
    "rejected_answers_are_learnt",
    "meshwright.train.run.columns",
    "if group > 1 and (given is None or given.rows != group):",
    "if False:",
    f"{_REFUSED}[None-{{}}-the cross entropy takes each by itself, so that rejected answers would be learnt]",
    kind="data of preferences are trained on as plain text",
)
_bug(
    "biases_decay",
    "meshwright.optim.groups",
    "for is_one, decay in ((True, weight_decay), (False, 0.0))",
    "for is_one, decay in ((True, weight_decay), (False, weight_decay))",
    f"{_OPTIM}::test_parameters_shrink_exactly_where_decay_is_asked_for[0.1-AdamW]",
    kind="what was exempt is decayed",
)
_bug(
    "norms_are_known_by_name_alone",
    "meshwright.optim.groups",
    "if owner is not None and _NORM_CLASS.search(type(owner).__name__):",
    "if False:",
    "tests/optim/test_decay.py::test_every_strategy_decays_the_same_parameters_of_a_model_of_ones_own[fsdp2, recomputation]",
    kind="a norm is decayed",
)
_bug(
    "vectors_in_the_shape_in_which_they_are_broadcast",
    "meshwright.optim.groups",
    'if last != "weight" and sum(size > 1 for size in shape) < 2:',
    "if False:",
    "tests/optim/test_decay.py::test_names_of_wrappers_and_adapters_say_nothing[q_proj.ia3_l.default-shape3-False]",
    kind="a vector is decayed since it has several dims",
)
_bug(
    "rope_of_the_longest_row_here",
    "meshwright.step.agreement",
    "return sums, [*equal, self.most, self.longest]",
    "return sums, [*equal, self.most, 0]",
    "tests/step/test_rope_length.py::test_rope_that_looks_at_the_batch_gives_the_same_loss_in_every_layout"
    "[1-single-sizes0-2-longrope-padded]",
    kind="frequencies of positions hang on the division of a step",
)
_bug(
    "rope_remembers_longer_steps",
    "meshwright._compat.transformers",
    "if known > rope.original_max_seq_len:",
    "if False:",
    "tests/step/test_rope_length.py::test_rows_of_one_length_have_the_loss_of_transformers_after_longer_ones_too[dynamic]",
    kind="a step hangs on the lengths of those before it",
)
_bug(
    "unanswered_turns_of_marked_templates",
    "meshwright.data.encoding.answers",
    "unanswered=len(conversation.messages) - len(whole.messages))",
    "unanswered=0)",
    "tests/data/test_chat.py::test_turns_behind_the_last_answer_are_left_out_and_counted[llama3-answers]",
    kind="a part of a record is left out without a word",
)
_bug(
    "decay_by_default",
    "meshwright.optim.build",
    'decay = {"weight_decay": 0.0} if "weight_decay" in inspect.signature(cls).parameters else {}',
    "decay: dict[str, float] = {}",
    f"{_OPTIM}::test_parameters_shrink_exactly_where_decay_is_asked_for[0.0-AdamW]",
    kind="the default of an optimizer acts where the run asks for none",
)
_bug(
    "last_group_wins",
    "meshwright.optim.groups",
    "name: next((number for number, group in enumerate(groups) if fits(name, group)), len(groups))",
    "name: max((number for number, group in enumerate(groups) if fits(name, group)), default=len(groups))",
    f"{_GROUPS}::test_the_first_group_that_a_parameter_fits_has_it_and_the_rest_is_of_the_top_level",
    kind="a parameter is of another group than the first that it fits",
)
_bug(
    "embeddings_are_matrices",
    "meshwright.optim.groups",
    "is_weight = name.startswith(blocks) and",
    "is_weight =",
    f"{_GROUPS}::test_matrices_are_the_weights_of_linear_maps_within_blocks[llama-expected0]",
    kind="embedding or head is orthogonalized",
)
_bug(
    "groups_of_one_stage",
    "meshwright_pipeline.state.manager",
    "made = self.mesh.world.together(lambda: for_model(factory, whole))",
    "made = self.mesh.world.together(lambda: for_model(factory, mine))",
    f"{_GROUPS}::test_a_group_may_be_of_one_stage_alone_and_one_of_none_is_an_error_on_all_ranks",
    kind="a stage is taken for the whole model",
)
_bug(
    "decay_of_a_group_is_spared",
    "meshwright.optim.build",
    "no_decay = () if says_decay else _patterns(config)",
    "no_decay = _patterns(config)",
    f"{_GROUPS}::test_a_group_that_gives_a_decay_means_its_norms_too_and_one_that_does_not_spares_them",
    kind="a setting of a group is dropped without a word",
)
_bug(
    "options_of_another_optimizer",
    "meshwright.optim.build",
    "options = group.options if is_other else {**config.options, **group.options}",
    "options = group.options",
    f"{_GROUPS}::test_each_group_has_its_own_settings_and_what_it_leaves_out_from_the_top_level",
    kind="a group has the defaults of its optimizer in the place of the run's options",
)
_bug(
    "first_member_alone_loads",
    "meshwright.optim.optimizers",
    "mine = [next(groups) for _ in member.param_groups]",
    "mine = list(member.param_groups)",
    f"{_GROUPS}::test_state_and_rates_of_all_members_go_on_in_another_layout[pipeline over fsdp2-fsdp2]",
    kind="state that is loaded goes to nobody",
)
_bug(
    "members_untried",
    "meshwright.optim.trial",
    "for member in members_of(optimizer) for each in _kinds(member, parts)]",
    "for member in members_of(optimizer)[1:] for each in _kinds(member, parts)]",
    f"{_GROUPS}::test_muon_is_refused_by_name_where_a_rank_has_pieces[megatron_fsdp]",
    kind="an optimizer that steps parts wrongly is taken",
)
_bug(
    "average_of_old_weights",
    "meshwright.train.loop.ema",
    "optimizer.register_step_post_hook(self._after_step)",
    "optimizer.register_step_pre_hook(self._after_step)",
    f"{_EMA}::test_each_option_of_an_average_acts_as_by_hand[decay]",
    kind="an average is a step behind",
)
_bug(
    "warmup_of_steps",
    "meshwright.train.loop.ema",
    "averages.update(self.decay_of(updates))",
    "averages.update(self.decay_of(steps))",
    f"{_EMA}::test_each_option_of_an_average_acts_as_by_hand[all]",
    kind="what counts updates counts steps",
)
_bug(
    "average_begins_anew",
    "meshwright_pipeline.state.pieces_of_stages",
    "if name == COUNTS or names.first_stage(name) == index",
    "if name != COUNTS and names.first_stage(name) == index",
    f"{_EMA}::test_an_average_goes_on_in_another_layout[pipeline over ddp-megatron_fsdp]",
    kind="what has been counted is lost in a checkpoint",
)
_bug(
    "copies_keep_their_average",
    "meshwright_pipeline.state.pieces_of_stages",
    "_add(averages, names.canonical.get(name, name), sharded)",
    "averages.setdefault(names.canonical.get(name, name), sharded) if names.first_stage(name) else None",
    f"{_EMA}::test_an_average_goes_on_in_another_layout[fsdp2-pipeline over ddp]",
    kind="a copy on another stage is not loaded",
)
_bug(
    "averages_in_half_precision",
    "meshwright.tensors.averages",
    "parts.empty(each, torch.promote_types(each.dtype, torch.float32))",
    "parts.empty(each, each.dtype)",
    f"{_EMA}::test_an_export_of_the_average_is_the_averaged_model_in_the_dtype_of_the_weights",
    kind="what is added up is rounded at each step",
)
_bug(
    "averages_are_left_in_place",
    "meshwright.manager.data_parallel",
    "                exchanged.undo()",
    "                pass",
    f"{_EMA}::test_each_option_of_an_average_acts_as_by_hand[decay]",
    kind="training goes on with averaged weights",
)
_bug(
    "averages_are_not_put_to_use",
    "meshwright.manager.data_parallel",
    "        with self.loading(None):\n            exchanged = self.averages.exchange()",
    "        exchanged = self.averages.exchange()",
    f"{_EMA}::test_the_average_is_that_of_one_process_by_hand[ddp, gathers to come]",
    kind="modules compute with weights that have been replaced",
)
_bug(
    "export_of_plain_weights",
    "meshwright.checkpoint.stored_model",
    "stored = averaged if self._average and averaged in self._index.kinds",
    "stored = averaged if not averaged and averaged in self._index.kinds",
    f"{_EMA}::test_an_export_of_the_average_is_the_averaged_model_in_the_dtype_of_the_weights",
    kind="an export is of other tensors than were asked for",
)
_bug(
    "any_checkpoint_has_an_average",
    "meshwright.checkpoint.loading",
    "world.raise_together(CheckpointError(message) if names else None)",
    "world.raise_together(None)",
    f"{_EMA}::test_a_checkpoint_without_an_average_is_told_of_and_one_may_begin_after_it",
    kind="what a checkpoint lacks is not noticed",
)
_bug(
    "average_of_a_run_begins_anew",
    "meshwright.train.run.assembly",
    "ema = None if source is not None and not source.has_average else _average(config, manager)",
    "ema = None if source is not None else _average(config, manager)",
    f"{_EMA}::test_a_run_keeps_its_average_through_an_interruption_and_writes_it_beside_the_model",
    kind="a run that goes on forgets",
)
_bug(
    "schedule_a_step_behind",
    "meshwright.optim.schedules",
    '"last_epoch": step, "_step_count": step + 1,',
    '"last_epoch": step - 1, "_step_count": step,',
    f"{_RUN}::test_every_schedule_is_put_where_its_steps_lead",
    kind="after resume the schedule is a step behind",
)
_bug(
    "metrics_of_steps_that_are_gone",
    "meshwright.train.run.report",
    "        if result.step <= until:\n            found.append(result)",
    "        found.append(result)",
    f"{_RUN}::test_metrics_end_at_the_step_that_a_run_goes_on_from",
    kind="metrics are not cut off at the step that a run goes on from",
)
_bug(
    "finished_runs_train_anew",
    "meshwright.train.run.fate",
    "    return source == AUTO or before.resumption.source == source\n",
    "    return False\n",
    f"{_RUN}::test_a_finished_run_says_so_and_touches_nothing[True]",
    kind="a finished run is removed and trained anew",
)
_bug(
    "replaced_unasked",
    "meshwright.train.run.fate",
    "    if held and not config.overwrite:\n",
    "    if False:\n",
    "tests/cli/test_cli.py::test_bad_input_is_one_error_before_anything_is_started_or_written[results in the way]",
    kind="results of an earlier run are replaced unasked",
)
_bug(
    "another_run_goes_on",
    "meshwright.train.run.resume",
    "    if refused:\n",
    "    if False:\n",
    "tests/train/test_run_directory.py::test_an_allowed_change_acts_as_in_a_handwritten_loop[optimizer.lr]",
    kind="a run goes on from a checkpoint of another",
)
_bug(
    "other_data_at_the_old_place",
    "meshwright.train.run.resume",
    'if any(name == "seed" or name.startswith("data.") for name in self.changed):',
    "if False:",
    f"{_RUN}::test_other_data_begin_at_their_start_and_the_position_is_remembered",
    kind="the beginning of new data is skipped",
)
_bug(
    "rate_stands_still",
    "meshwright.train.loop.step",
    "        scheduler.step()\n",
    "        pass\n",
    f"{_TRAIN}::test_observers_see_every_step_while_they_are_registered",
    kind="the learning rate does not follow its schedule",
)
_bug(
    "rate_of_the_next_step_is_told",
    "meshwright.train.loop.step",
    "learning_rate=float(scheduled[0]),",
    "learning_rate=float(loop.scheduler.get_last_lr()[0] if loop.scheduler else 0.0),",
    f"{_TRAIN}::test_observers_see_every_step_while_they_are_registered",
    kind="the rate that is reported is not the one that was used",
)
_bug(
    "nan_is_trained_on",
    "meshwright.train.loop.bad_steps",
    "if not (math.isfinite(loss) and math.isfinite(norm)):",
    "if False:",
    f"{_TRAIN}::test_a_loss_that_is_not_finite_stops_all_ranks_before_the_parameters_change",
    kind="a loss that is not finite reaches the parameters",
)
_bug(
    "state_of_what_was_drawn_ahead",
    "meshwright.train.loop.ahead",
    "        self._drawn = self._begun(step)\n",
    "        self._drawn = self._begun(step)\n        self.state = self._drawn.state\n",
    f"{_FIT}::test_the_state_of_a_loader_is_in_the_checkpoint_and_no_row_is_read_again",
    kind="a checkpoint tells of a loader that is a step ahead, so that a batch is skipped",
)
_bug(
    "patience_with_another_measure",
    "meshwright.train.run.resume",
    'if "objective" not in sections:',
    "if sections is not None:",
    f"{_FIT_RUN}::test_a_run_that_another_has_stopped_early_is_not_begun",
    kind="losses under one objective are compared with those under another",
)

# -- fsdp2

_bug(
    "mean_over_ranks",
    "meshwright_fsdp2.sharding",
    "    unit.set_gradient_divide_factor(1.0)\n    unit.set_force_sum_reduction_for_comms(True)\n",
    "    pass\n",
    _FSDP2,
    kind="a mean over ranks in the place of a sum",
)
_bug(
    "every_tile_is_the_first",
    "meshwright.model.random_tiles",
    "fill.stream + tile.number",
    "fill.stream",
    "tests/model/test_initial_weights.py::test_values_depend_on_the_seed_and_not_on_threads_and_tiles_differ",
    kind="parts of a weight matrix start with the same values",
)
_bug(
    "padding_rows_keep_their_noise",
    "meshwright.model.random_tiles",
    "                target = values[begin:end]\n",
    "                target = values[begin:begin]\n",
    "tests/model/test_initial_weights.py::test_rows_that_are_set_are_set_in_every_tile",
    kind="what a constructor sets to zero starts with noise",
)
_bug(
    "packed_parts_lie_as_they_come",
    "meshwright._compat.torch",
    "rows.unflatten(0, (ranks, parts, -1)).transpose(0, 1)",
    "rows.unflatten(0, (ranks, parts, -1))",
    "tests/contract/test_compat.py::test_a_packed_shard_divides_each_part",
    kind="packed weights are gathered in a wrong order",
)
_bug(
    "allocator_of_the_user_is_replaced",
    "meshwright.base.allocator",
    "if uses_expandable_segments(environment) and not _settings(environment) and _is_supported():",
    "if _is_supported():",
    "tests/launch/test_environment.py::test_expandable_segments_are_set_unless_the_user_has_set_the_allocator[given3-False]",
    kind="what the user has set is overwritten",
)
_bug(
    "workspaces_are_free",
    "meshwright.plan.device",
    "return 2 * self.workspace_bytes",
    "return 0",
    "tests/plan/test_plan.py::test_workspaces_of_both_threads_are_planned[h200-64]",
    kind="a plan leaves out memory that libraries hold",
)
_bug(
    "missing_gradients_are_left_out",
    "meshwright_fsdp2.sharding",
    "    reduce_unused(module)\n",
    "    pass\n",
    f"{_UNUSED}[sizes0-ranks-config2]",
    kind="gradients of different parameters are added up",
)
_bug(
    "shards_forget_cp",
    "meshwright_fsdp2.unit_options",
    'shard = "dp_shard_cp" if mesh.degrees.cp > 1 else "dp_shard"',
    'shard = "dp_shard"',
    _CP,
    kind="gradients are not summed over the ranks that share a sequence",
)
_bug(
    "the_last_block_is_freed",
    "meshwright_fsdp2.unit_options",
    "reshard = not unit.is_last if self.reshard_after_forward is None",
    "reshard = True if self.reshard_after_forward is None",
    f"{_COUNTS}::test_gathers_parameters_for_forward_and_freed_ones_again_for_backward[plain-None-2]",
    kind="a default differs from the reference",
)
_bug(
    "nobody_used_it_and_it_decays",
    "meshwright_fsdp2.usage",
    "used = [name in self._used for name in trained]",
    "used = [True for name in trained]",
    f"{_UNUSED}[sizes0-None-config1]",
    kind="parameters without a gradient are decayed",
)
_bug(
    "summed_once_unasked",
    "meshwright_fsdp2.manager",
    "root.set_requires_gradient_sync(is_last or defer is not True)",
    "root.set_requires_gradient_sync(is_last)",
    f"{_COUNTS}::test_reduce_scatters_gradients_once_a_step_or_once_a_microbatch[False-3-2]",
    kind="an option is ignored",
)
_bug(
    "weights_from_before_the_step",
    "meshwright_fsdp2.manager",
    "        self._sharding.reshard()\n\n    def check_batches",
    "        pass\n\n    def check_batches",
    "plugins/fsdp2/tests/test_fsdp2_options.py::test_evaluation_and_unshard_leave_shards_and_the_reshard_policy_as_they_were[None]",
    kind="weights that were gathered before a step are used after it",
)
_bug(
    "what_is_frozen_later_is_stepped",
    "meshwright.manager.data_parallel",
    "                trained.grad = None",
    "                pass",
    "tests/optim/test_freezing.py::test_what_is_frozen_and_unfrozen_between_steps_trains_as_in_one_process[ddp-zero1-False]",
    kind="an option is read once and never again",
)
_bug(
    "engines_see_flags_that_change",
    "meshwright.manager.freezing",
    "        _set_flags(frozen, True)",
    "        pass",
    "tests/optim/test_freezing.py::test_what_is_frozen_and_unfrozen_between_steps_trains_as_in_one_process[ddp-False]",
    kind="an error of a library in place of what the user can do",
)
_bug(
    "a_recomputed_block_fills_the_cache_twice",
    "meshwright.model.recompute",
    "        put_around(block, Layer.RECOMPUTED, functools.partial(_without_cache, block))\n",
    "",
    "tests/model/test_recompute.py::test_blocks_take_no_cache_in_a_loop_that_says_nothing_of_caches[llama-selective]",
    kind="an error of a library in place of what the user can do",
)
_bug(
    "plain_layers_of_a_list_are_left",
    "meshwright_fsdp2.functions",
    "stacks=tuple(_lists(holder))",
    "stacks=layout_by_structure(holder).stacks",
    "plugins/fsdp2/tests/test_fsdp2_functions.py::test_members_of_lists_are_sharded_whatever_they_are",
    kind="what is asked for is not done, and nothing says so",
)
_bug(
    "the_residual_stream_is_as_narrow_as_weights",
    "meshwright_fsdp2.unit_options",
    "            stream_dtype(config),\n",
    "            None,\n",
    "plugins/fsdp2/tests/test_fsdp2_options.py::test_autocast_with_a_wide_output_keeps_the_residual_stream_wide[llama-config0-sizes0]",
    kind="an option is ignored",
)
_bug(
    "autocast_dropped",
    "meshwright_fsdp2.manager",
    "        if self.config.autocast_dtype is not None:",
    "        if False:",
    f"{_F}/test_fsdp2_options.py::test_autocast_acts_when_the_module_is_called_by_hand",
    kind="autocast is dropped",
)
_bug(
    "reduce_dtype_ignored",
    "meshwright_fsdp2.unit_options",
    "return policy if sums is None else replace(policy, reduce_dtype=getattr(torch, sums))",
    "return policy",
    f"{_COUNTS}::test_gradients_travel_in_the_reduce_dtype_and_parameters_in_their_own",
    kind="the dtype of sums is ignored",
)
_bug(
    "blocks_cast_the_residual",
    "meshwright_fsdp2.unit_options",
    "    return replace(policy, output_dtype=None)\n",
    "    return policy\n",
    "plugins/fsdp2/tests/test_fsdp2_options.py::test_precision[{'mp_policy': {'param_dtype': 'bfloat16', 'output_dtype': 'float32'}}-{'product': torch.bfloat16, 'weight': torch.bfloat16, 'residual': torch.bfloat16, 'logits': torch.float32, 'reduced': torch.bfloat16}]",
    kind="each block casts the residual stream",
)

# -- ddp

_bug(
    "shard_off_by_one",
    "meshwright_ddp.buckets",
    "return start + rank * size, start + (rank + 1) * size",
    "return start + rank * size, start + (rank + 1) * size - 1",
    f"{_D}/test_ddp_layout.py::test_every_element_is_owned_once",
    kind="the shard of the distributed optimizer is off by one",
)
_bug(
    "buckets_end_late",
    "meshwright_ddp.buckets",
    "position - bucket_start >= bucket_size",
    "position - bucket_start > bucket_size",
    f"{_D}/test_ddp_layout.py::test_only_the_last_parameter_of_a_bucket_brings_it_to_its_size",
    kind="the boundary of a bucket is off by one",
)
_bug(
    "parameters_unaligned",
    "meshwright_ddp.buckets",
    "        start = _round_up(position, start_multiple)\n",
    "        start = position\n",
    f"{_D}/test_ddp_layout.py::test_parameters_and_buckets_are_aligned",
    kind="parameters lie elsewhere than in the reference",
)
_bug(
    "reduced_before_it_is_ready",
    "meshwright_ddp.buckets",
    "        self.missing = len(self.slots)\n",
    "        self.missing = len(self.slots) - 1\n",
    f"{_BUCKETED}::test_parity[{{'engine': 'bucketed', 'overlap_grad_reduce': True, 'bucket_size': 3000}}]",
    kind="a bucket is reduced before all of its gradients are there",
)
_bug(
    "averages_are_not_made_up_for",
    "meshwright_ddp.buckets",
    "Scaling(groups.ranks, average=True)",
    "Scaling(1.0, average=True)",
    f"{_BUCKETED}::test_parity[{{'engine': 'bucketed', 'overlap_grad_reduce': True, 'bucket_size': 3000, "
    "'average_in_collective': True}]",
    kind="a mean over ranks in the place of a sum",
)
_bug(
    "buffers_keep_the_last_step",
    "meshwright_ddp.gradient_sync",
    "            slot.local.copy_(gradient)\n",
    "            slot.local.add_(gradient)\n",
    f"{_BUCKETED}::test_parity[{{'engine': 'bucketed'}}]",
    kind="gradients of the step before are still in the buffer",
)
_bug(
    "unused_ones_keep_theirs",
    "meshwright_ddp.gradient_sync",
    "                slot.gradient.zero_()\n",
    "                pass\n",
    f"{_BUCKETED}::test_parity_where_parameters_and_tokens_differ_between_ranks[routed-ranks-2.0-{{'engine': "
    "'bucketed', 'overlap_grad_reduce': True, 'bucket_size': 3000}]",
    kind="a rank that did not use a parameter adds its gradient of an earlier step",
)
_bug(
    "masters_are_not_written",
    "meshwright_ddp.optimizer",
    "        copy_all([shard.values for shard in masters], [shard.tensor.detach() for shard in masters])\n",
    "        pass\n",
    f"{_D}/test_ddp_optimizer.py::test_bf16_training_is_that_of_float32_masters_to_the_last_bit[overlap0-True]",
    kind="the model does not get what the optimizer has stepped",
)
_bug(
    "masters_in_half_precision",
    "meshwright_ddp.optimizer",
    "    if parameter.dtype in HALF:\n",
    "    if False:\n",
    f"{_D}/test_ddp_optimizer.py::test_bf16_training_is_that_of_float32_masters_to_the_last_bit[overlap0-True]",
    kind="parameters are kept in the wrong dtype",
)
_bug(
    "gathered_before_the_step",
    "meshwright_ddp.parameter_gather",
    "            gather.is_stale = True\n",
    "            gather.is_stale = False\n",
    f"{_BUCKETED}::test_parity[{{'engine': 'bucketed', 'use_distributed_optimizer': True}}]",
    kind="parameters are gathered before the step, and not after it",
)
_bug(
    "one_instance_alone",
    "meshwright_ddp.reduction",
    "        if self._groups.across is not None:\n",
    "        if False:\n",
    f"{_BUCKETED}::test_what_each_rank_holds_after_the_reduction[2-True-scaling4-False-first4]",
    kind="gradients are summed within one instance of the optimizer alone",
)
_bug(
    "torch_averages",
    "meshwright_ddp.torch_engine",
    "        self.module.register_comm_hook(state, hook)\n",
    "        del state, hook\n",
    _DDP,
    kind="a mean over ranks in the place of a sum",
)

# -- megatron_fsdp

_bug(
    "an_average_stays",
    "meshwright_megatron_fsdp.reduction",
    "self._factor = mesh.data_size * mesh.degrees.cp if config.average_in_collective else 1",
    "self._factor = 1",
    "tests/testing/test_conformance.py::test_strategy_passes[megatron_fsdp-dp_shard=4-average_in_collective=True]",
    kind="a mean over ranks in the place of a sum",
)
_bug(
    "old_weights_in_forward",
    "meshwright_megatron_fsdp.manager",
    "        self._fsdp.zero_grad_buffer()\n        self._install()\n",
    "        self._fsdp.zero_grad_buffer()\n",
    f"{_M}/test_megatron_fsdp.py::test_bf16_with_float32_weights_and_sums_is_exactly_what_one_process_computes[2]",
    kind="the model does not get what the optimizer has stepped",
)
_bug(
    "every_microbatch_is_reduced",
    "meshwright_megatron_fsdp.reduction",
    "self._fsdp.is_last_microbatch = is_last and self._config.overlap_grad_reduce",
    "self._fsdp.is_last_microbatch = self._config.overlap_grad_reduce",
    f"{_ZERO}[ZeRO 1-accumulation, tied]",
    kind="gradients that are summed already are reduced again",
)
_bug(
    "state_of_one_rank",
    "meshwright_megatron_fsdp.shards",
    "            dist.all_reduce(flat, group=slot.group)\n",
    "",
    f"{_M}/test_megatron_fsdp_tensor.py::test_state_moves_to_single_and_back[{{}}]",
    kind="a whole state holds the parts of one rank",
)

# -- pipeline

_bug(
    "backward_in_another_order",
    "meshwright_pipeline.schedule.rules",
    "            if rule.last_first and kind is Kind.BACKWARD:",
    "            if kind is Kind.BACKWARD:",
    f"{_SCHEDULES}[GPipe]",
    kind="microbatches run in the wrong order",
)
_bug(
    "a_longer_lead",
    "meshwright_pipeline.schedule.rules",
    "lead = (1 if chunks == 1 else 2) * (ranks - 1 - rank)",
    "lead = 2 * (ranks - 1 - rank)",
    f"{_SCHEDULES}[1F1B]",
    kind="a rank holds more microbatches than the schedule says",
)
_bug(
    "copies_train_apart",
    "meshwright_pipeline.manager",
    "shared = self._copies.sum_gradients(found)",
    "shared = None",
    f"{_STAGES}[1F1B]",
    kind="copies of a tied weight on several stages are not summed",
)
_bug(
    "tied_weights_count_twice",
    "meshwright_pipeline.state.copies",
    "for name, holders in shared.items() if stage in holders[1:]]",
    "for name, holders in shared.items() if stage in holders[:0]]",
    f"{_STAGES}[1F1B]",
    kind="tied weights count twice in the norm",
)
_bug(
    "dropout_in_evaluation_of_stages",
    "meshwright_pipeline.manager",
    "            manager.module.eval()\n",
    "            manager.module.train()\n",
    "tests/train/test_train.py::test_evaluation_draws_no_dropout[{'pp_size': 2}]",
    kind="evaluation runs in training mode",
)
_bug(
    "norm_of_a_stage",
    "meshwright_pipeline.state.gradient_norms",
    'return joined_norm(norms, norm_type, mesh.group("pp"), mesh.device)',
    "return torch.stack(norms).norm(norm_type)",
    f"{_STAGES}[1F1B]",
    kind="each stage clips by the norm of its own parameters",
)
_bug(
    "loss_of_one_data_rank",
    "meshwright_pipeline.manager",
    'over=mesh.group("dp_cp")',
    'over=mesh.group("cp")',
    f"{_STAGES}[1F1B]",
    kind="the loss is that of one rank's batch",
)
_bug(
    "reduced_in_every_run",
    "meshwright_pipeline.run.all_runs",
    "is_last = start + length >= len(batches)",
    "is_last = True",
    "plugins/pipeline/tests/test_pipeline.py::test_a_schedule_that_runs_twice_in_a_step_and_is_filled_up[ddp]",
    kind="gradients that are summed already are reduced again",
)
_bug(
    "tokens_of_the_first_step",
    "meshwright_pipeline.run.stage",
    "        self._num_tokens, self._microbatches = num_tokens, microbatches\n",
    "        self._num_tokens = self._num_tokens if self._num_tokens > 1 else num_tokens\n"
    "        self._microbatches = microbatches\n",
    f"{_STAGES}[1F1B]",
    kind="the loss is divided by the tokens of another step",
)
_bug(
    "idle_microbatches_have_another_loss",
    "meshwright_pipeline.run.stage",
    "tally = self._uncounted if isinstance(batch, Idle) else self._tally",
    "tally = None if isinstance(batch, Idle) else self._tally",
    f"{_HEADS}::test_rewards_of_sequences_train_as_on_one_rank[pp]",
    kind="what fills up is computed in another way than what it stands beside",
)
_bug(
    "idle_microbatches_count",
    "meshwright_pipeline.run.batches",
    'idle = Idle(pieces[0], labels=torch.full_like(pieces[0]["labels"], IGNORED_LABEL))',
    "idle = Idle(pieces[0])",
    "plugins/pipeline/tests/test_pipeline.py::test_a_schedule_that_runs_twice_in_a_step_and_is_filled_up[ddp]",
    kind="microbatches that fill up a run are trained on",
)
_bug(
    "reduced_before_the_weights",
    "meshwright_pipeline.run.actions",
    "if isinstance(each, Action) and each.kind is not Kind.FORWARD]",
    "if isinstance(each, Action) and each.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]",
    f"{_STAGES}[ZBVZeroBubble]",
    kind="gradients are reduced before those of the weights are there",
)
_bug(
    "draining_stage_not_reduced",
    "meshwright_pipeline.run.actions",
    "            late.reduce()\n",
    "            pass\n",
    f"{_STAGES}[1F1B]",
    kind="a reduction that was put off is forgotten",
)
_bug(
    "gradient_waits_for_the_reduction",
    "meshwright_pipeline.run.actions",
    "        if last and isinstance(order[-1], Exchange) and",
    "        if last and isinstance(order[-1], Action) and",
    f"{_P}/test_pipeline.py::test_a_stage_that_is_done_reduces_while_those_before_it_still_compute"
    "[ddp-{}-1f1b-('ssss G', 'ssss G')]",
    kind="a rank reduces its gradients before it sends what another waits for",
)
_bug(
    "outputs_kept_for_backward",
    "meshwright_pipeline.run.actions",
    "_InFlight(_floating(received), edges)\n",
    "_InFlight(_floating(received), edges)\n            self._flying[action.stage, index].kept = output\n",
    f"{_P}/test_pipeline.py::test_sent_tensors_that_a_rank_holds_do_not_grow_with_the_microbatches[GPipe]",
    kind="what has been sent is held until backward",
)
_bug(
    "transfers_one_by_one",
    "meshwright_pipeline.schedule.timeline",
    "in _by_ranks(sends, schedule).items():",
    "in (pair for send in sends for pair in _by_ranks([send], schedule).items()):",
    f"{_P}/test_schedules.py::test_what_two_ranks_have_for_each_other_at_one_moment_is_one_exchange[1F1B-14-24]",
    kind="what could go together goes one by one",
)
_bug(
    "rates_of_old_groups",
    "meshwright_pipeline.state.optimizer",
    "return [group for manager in self._managers for group in manager.optimizer.param_groups]",
    'return self.__dict__.setdefault("_kept", [g for m in self._managers for g in m.optimizer.param_groups])',
    f"{_P}/test_pipeline_optimizer.py::test_rates_reach_every_stage_after_loading[checkpoint]",
    kind="the learning rate is frozen after resume, while the scheduled one is reported",
)
_bug(
    "any_loss_passes",
    "meshwright.step.objective_trial",
    "    if is_known and abs(whole - first - second) > 1e-3 * (abs(first) + abs(second)):",
    "    if False:",
    "plugins/pipeline/tests/test_pipeline.py::test_what_cannot_be_done_is_refused_on_all_ranks[single-{}-{'loss_fn': <function _mean>}-Case(model_type='llama', tied=False, layers=None, steps=3, s-['ConfigError', 'loss_fn', 'no sum over sequences']]",
    kind="a mean over tokens is taken for a sum",
)

# -- activations

_BUDGET = "tests/model/test_activation_budget.py"
_FORESEEN = f"{_BUDGET}::test_what_blocks_hold_is_foreseen_to_the_byte_and_changes_no_bit[llama]"

_bug(
    "one_microbatch_in_flight",
    "meshwright.model.knapsack",
    "sum(count * each for count, each in",
    "sum(each for count, each in",
    f"{_BUDGET}::test_microbatches_in_flight_count_and_those_of_all_stages",
    kind="a budget forgets the other microbatches in flight",
)
_bug(
    "each_operator_is_the_first",
    "meshwright.model.budget",
    "        counts[op] += 1\n",
    "",
    _FORESEEN,
    kind="all calls of an operator are held in the place of one",
)
_bug(
    "random_results_are_held",
    "meshwright.model.operators",
    "can_be_held=made > 0 and not draws_random_numbers(func, args, kwargs),",
    "can_be_held=made > 0,",
    f"{_BUDGET}::test_random_numbers_are_drawn_again_by_all_operators_that_draw",
    kind="dropout is drawn again from another place of the stream",
)
_bug(
    "tried_without_gradients",
    "meshwright.model.budget",
    "return value.detach().requires_grad_()",
    "return value.detach()",
    _FORESEEN,
    kind="what is measured on trial is not what training holds",
)
_bug(
    "weights_go_to_the_host",
    "meshwright.model.offload",
    " or self._keeps(storage)",
    "",
    f"{_BUDGET}::test_what_blocks_hold_goes_to_host_memory_and_back_once",
    kind="parameters are copied with the activations",
)
_bug(
    "gathered_weights_go_to_the_host",
    "meshwright.model.offload",
    "if id(storage) not in self._stays and is_parameter_of(self._block, storage):",
    "if False:",
    f"{_BUDGET}::test_parameters_that_come_within_a_block_do_not_go_to_host_memory",
    kind="parameters that are gathered within a block are copied with its activations",
)
_bug(
    "gathered_weights_are_activations",
    "meshwright.model.operators",
    "if not is_parameter_of(self._block, storage):",
    "if True:",
    f"{_BUDGET}::test_parameters_that_come_within_a_block_do_not_go_to_host_memory",
    kind="a budget counts parameters that are gathered within a block",
)
_bug(
    "summed_in_half_precision",
    "meshwright_fsdp2.sharding",
    "torch.sum(received.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)",
    "output_tensor.copy_(received.view(group.size(), -1).sum(0))",
    f"{_COUNTS}::test_messages_of_bfloat16_are_summed_in_float32",
    kind="the sum is rounded, not only what is sent",
)

# -- objectives in layouts

_LAYOUT = "tests/step/test_objective_layouts.py"
_AT_ONCE = f"{_LAYOUT}::test_everything_at_once_is_as_on_one_rank"
_STATS = "tests/step/test_token_stats.py::test_statistics_are_those_of_plain_transformers"

_bug(
    "sharers_count_twice",
    "meshwright.manager.forward",
    "loss = value / (num_tokens * self.sharers)",
    "loss = value / num_tokens",
    f"{_AT_ONCE}[cp]",
    kind="what all ranks of cp have computed alike is added up",
)
_bug(
    "gathered_without_their_gradients",
    "meshwright.parallel.context.positions",
    "        whole: Tensor = GatherPositions.apply(part, group, 1)\n        return whole",
    "        whole: Tensor = GatherPositions.apply(part, group, 1)\n"
    "        return whole / group.size() + whole.detach() * (1 - 1 / group.size())",
    f"{_AT_ONCE}[cp]",
    kind="the gradient of what is gathered is that of one rank alone",
)
_bug(
    "columns_of_the_first_piece",
    "meshwright_pipeline.run.batches",
    "name: tensor[start : start + size] if tensor.shape[:1] == (count,) else tensor",
    "name: (tensor[start : start + size] if tensor.dim() < 3 else tensor[:size]) "
    "if tensor.shape[:1] == (count,) else tensor",
    f"{_AT_ONCE}[pp-interleaved]",
    kind="a pipeline cuts the model's inputs, and not what an objective has beside",
)
_bug(
    "statistics_backwards",
    "meshwright_pipeline.run.statistics",
    "for piece in recorder.found]",
    "for piece in reversed(recorder.found)]",
    f"{_STATS}[pp-interleaved]",
    kind="in the order of the schedule, not in that of the batch",
)
_bug(
    "sums_of_one_stage",
    "meshwright.manager.ending",
    "            dist.all_reduce(sums[: count + 1 + len(self._shared.used)], group=stages)",
    "            dist.all_reduce(sums[:1], group=stages)\n"
    "            dist.all_reduce(sums[count : count + 1 + len(self._shared.used)], group=stages)",
    f"{_AT_ONCE}[pp-interleaved]",
    kind="further sums are those of the last stage, and 0 elsewhere",
)
_bug(
    "idle_pieces_count",
    "meshwright_pipeline.run.stage",
    "tally = self._uncounted if isinstance(batch, Idle) else self._tally",
    "tally = self._tally",
    f"{_AT_ONCE}[pp]",
    kind="an objective is asked of what only fills up the schedule",
)
_bug(
    "counted_by_one_rank",
    "meshwright.step.batch",
    "else self.objective.count(microbatches)",
    "else self.objective.count(microbatches) * (torch.distributed.get_rank() == 0)",
    f"{_LAYOUT}::test_an_objective_that_counts_for_itself_is_announced[ddp-zero1]",
    kind="what an objective counts is not added up over ranks",
)
_bug(
    "tried_with_one_row",
    "meshwright.manager.forward",
    "[: rows if divides_rows else sequences]",
    "[:sequences]",
    "tests/contract/test_axis.py::test_it_takes_any_objective[4]",
    kind="what is tried leaves ranks without a row",
)
_bug(
    "recorder_of_the_last_names",
    "meshwright.step.tokens",
    "self.names, self.found = list(names), []",
    "self.names, self.found = self.names or list(names), []",
    "tests/step/test_token_stats.py::test_other_names_are_told_the_next_time",
    kind="what was asked for first is told again",
)
_bug(
    "router_loss_beside_no_objective",
    "meshwright.manager.forward",
    "        if self._router_loss is None:\n            return loss",
    "        if self._router_loss is None or tally is not None:\n            return loss",
    "tests/step/test_router_loss_objective.py::test_it_is_the_objective_and_the_models_own_router_loss",
    kind="a router loss goes with the token loss alone",
)

# -- traffic

_TRAFFIC = "tests/tensors/test_traffic.py::test_a_step_sends_the_least_and_what_is_told_beside_it"

_bug(
    "gathered_twice",
    "meshwright_ddp.parameter_gather",
    "            self.gather_all()\n\n    def gather_all",
    "            self.gather_all()\n"
    "            for gather in self._gathers:\n"
    "                gather.is_stale = True\n"
    "            self._started = 0\n"
    "            self.gather_all()\n\n    def gather_all",
    f"{_TRAFFIC}[ddp, distributed optimizer]",
    kind="right numbers, twice the traffic",
)
_bug(
    "reduced_to_everybody",
    "meshwright_ddp.reduction",
    "            self._issue(force_all_reduce)\n            return",
    "            self._issue(True)\n            return",
    f"{_TRAFFIC}[ddp, distributed optimizer]",
    kind="gradients are reduced to ranks that do not need them",
)

# -- whole parameters

_GIVEN = (
    "tests/contract/test_iter_parameters.py::test_names_order_and_bits_are_those_of_the_unwrapped_model_on_every_rank"
)

_bug(
    "bytes_where_no_element_may_begin",
    "meshwright.tensors.rounds",
    "begin = _up(self._ends[rank], each.itemsize)\n                self._ends",
    "begin = self._ends[rank]\n                self._ends",
    "tests/tensors/test_rounds.py::test_each_element_travels_once_within_the_bucket",
    kind="two dtypes in one buffer, without room between them",
)
_bug(
    "a_round_that_is_not_the_last",
    "meshwright.tensors.rounds",
    "is_last=begin + most >= max(counts), is",
    "is_last=True, is",
    "tests/tensors/test_rounds.py::test_each_element_travels_once_within_the_bucket",
    f"{_GIVEN}[fsdp2]",
    kind="a tensor is given before all of it has come",
)
_bug(
    "one_more_parameter_is_held",
    "meshwright.tensors.whole_parameters",
    "                else:\n                    begun = value\n                del value",
    "                else:\n                    begun = value",
    "tests/contract/test_iter_parameters.py::test_a_bucket_and_one_parameter_are_all_that_is_held[fsdp2-8192]",
    kind="a generator keeps what it has yielded while it makes the next",
)
_bug(
    "parameters_of_every_copy",
    "meshwright.tensors.whole_parameters",
    "return None if enough == 0 else candidates[enough - 1]",
    "return world.group or dist.group.WORLD",
    "tests/tensors/test_traffic.py::test_whole_parameters_travel_once_among_the_fewest_ranks_that_have_them[HSDP]",
    "tests/tensors/test_traffic.py::test_whole_parameters_travel_once_among_the_fewest_ranks_that_have_them"
    "[ddp, distributed optimizer]",
    kind="what a rank's neighbours have is sent from afar",
)
_bug(
    "an_engine_sees_the_step_before",
    "meshwright_ddp.manager",
    "        self._gather()\n        return super().parameter_pieces()",
    "        return super().parameter_pieces()",
    f"{_GIVEN}[ddp, distributed optimizer, gathers to come]",
    kind="parameters are read before what was stepped elsewhere has come",
)
_bug(
    "an_engine_is_given_main_weights",
    "meshwright_megatron_fsdp.manager",
    "name: each and replace(each, dtype=self._shards.computed_in(named[name]))",
    "name: each and replace(each, dtype=named[name].dtype)",
    f"{_GIVEN}[megatron_fsdp, ZeRO 3, main weights]",
    kind="an engine gets other weights than forward has used",
)
_bug(
    "parameters_in_the_order_of_ranks",
    "meshwright_pipeline.state.pieces_of_stages",
    "return {name: found.get(name) for name in names.order if names.canonical.get(name) == name}",
    "return dict(found)",
    f"{_GIVEN}[pipeline, fsdp2, interleaved]",
    kind="the order of parameters depends on the layout",
)

# -- what is given up with one rank alone

_BREAKS = (
    "tests/step/test_objective_errors.py::test_an_objective_that_breaks_on_one_rank_is_told_on_all_and_trains_nothing"
)

_bug(
    "errors_of_ours_are_raised_alone",
    "meshwright.step.objective",
    "            except MeshwrightError as error:\n                self.defect = error",
    "            except ConfigError as error:\n                self.defect = error",
    f"{_BREAKS}[read-refuses-BatchError in step 2: the ledger is full-ddp]",
    kind="a rank raises while its peers wait",
)
_bug(
    "given_stages_are_tried_without_hidden_states",
    "meshwright_pipeline.run.stage",
    "return self.manager.forward.try_objective(batch, given, complete=self._completed)",
    "return self.manager.forward.try_objective(batch, given)",
    "plugins/pipeline/tests/test_pipeline.py::test_stages_that_are_given_take_an_objective",
    kind="a stage in the middle is run as if it were a model",
)
_bug(
    "logits_of_sequences_stay_apart",
    "meshwright.manager.forward",
    "part = axis.joined_sequences(part) if of_sequences and axis.divides_sequences else axis.joined(part)",
    "part = axis.joined_sequences(part) if of_sequences else axis.joined(part)",
    "tests/step/test_heads.py::test_rewards_under_an_axis_that_divides_rows_are_those_of_whole_pairs",
    kind="what one rank has is taken for the whole",
)
_bug(
    "statistics_that_were_asked_before",
    "meshwright.step.objective",
    "        self.usual.clear()\n",
    "",
    "tests/step/test_objective.py::test_statistics_are_computed_at_once_and_no_others",
    kind="what is not asked for is computed",
)

# -- objectives

_OBJECTIVES = "tests/step/test_objectives.py"
_PADDED = f"{_OBJECTIVES}::test_rows_of_padding_and_masked_positions_count_for_nothing_whatever_they_hold"
_TRL = "tests/step/test_objectives_of_trl.py"
_GRPO = f"{_TRL}::test_grpo_is_that_of_trl"

_bug(
    "weights_of_0_counted",
    "meshwright.objectives.supervised",
    'counted = counted & (batch["weights"][:, :-1] != 0)',
    "counted = counted & True",
    f"{_OBJECTIVES}::test_weights_multiply_targets_and_those_of_weight_0_are_not_counted",
    kind="what is masked by a weight is divided by all the same",
)
_bug(
    "smoothing_added",
    "meshwright.objectives.supervised",
    "loss_BS = (1 - self.label_smoothing) * loss_BS + ",
    "loss_BS = loss_BS + ",
    f"{_OBJECTIVES}::test_cross_entropy_is_that_of_torch[0.1-0.0]",
    kind="two parts of a mean with more than the whole weight",
)
_bug(
    "pairs_as_halves",
    "meshwright.objectives.functions",
    "values_B.unflatten(0, (-1, 2)).unbind(1)",
    "values_B.chunk(2)",
    f"{_TRL}::test_dpo_is_that_of_trl[0.1-sigmoid-0.0]",
    f"{_OBJECTIVES}::test_rows_together_are_the_sum_of_rows_apart[orpo]",
    kind="rows in another library's order",
)
_bug(
    "mean_over_prompts_too",
    "meshwright.objectives.functions",
    "tokens.sequence_sum(tokens.mask).clamp(min=1)",
    "tokens.sequence_sum(tokens.targets > -200).clamp(min=1)",
    f"{_TRL}::test_simpo_is_that_of_trl[0.0]",
    kind="a mean over an answer is divided by prompt and padding, too",
)
_bug(
    "odds_multiplied",
    "meshwright.objectives.preference",
    "(chosen_P - rejected_P) - (log1mexp(chosen_P) - log1mexp(rejected_P))",
    "(chosen_P - rejected_P) + (log1mexp(chosen_P) - log1mexp(rejected_P))",
    f"{_OBJECTIVES}::test_orpo_is_the_odds_ratio_of_the_paper",
    f"{_TRL}::test_orpo_is_that_of_trl[0]",
    kind="a sign within a logarithm",
)
_bug(
    "margin_of_padding",
    "meshwright.objectives.heads",
    "[0].where(kept_P, 0.0)",
    "[0]",
    f"{_PADDED}[dtype0-reward]",
    kind="what a masked row holds reaches a gradient",
)
_bug(
    "constants_in_float32",
    "meshwright.objectives.preference",
    "good_B = wanted_B.to(own_B.dtype)",
    "good_B = wanted_B.float()",
    f"{_TRL}::test_kto_is_that_of_trl[0-kto]",
    kind="an option rounded to the default dtype",
)
_bug(
    "clipped_always",
    "meshwright.objectives.policy_loss",
    "torch.minimum(once_BS * advantages_BS, clipped_BS * advantages_BS)",
    "clipped_BS * advantages_BS",
    f"{_GRPO}[dapo-tokens-None-token]",
    kind="no way back from a ratio that is out of bounds",
)
_bug(
    "divergence_the_other_way",
    "meshwright.objectives.policy_loss",
    "self._sum(difference_BS.exp() - difference_BS - 1)",
    "self._sum((-difference_BS).exp() + difference_BS - 1)",
    f"{_GRPO}[grpo-sequence-None-token]",
    kind="an estimator of the KL divergence the other way around",
)
_bug(
    "ratio_of_the_whole_sequence",
    "meshwright.objectives.policy_loss",
    "(self._sum(log_ratio_BS) / self._lengths_D).exp()",
    "self._sum(log_ratio_BS).exp()",
    f"{_GRPO}[grpo-sequence-None-sequence]",
    kind="a sum where a mean over the sequence is meant",
)
_bug(
    "documents_counted_as_rows",
    "meshwright.objectives.policy",
    "if not self.packed:",
    "if True:",
    f"{_OBJECTIVES}::test_packed_documents_are_sequences_like_any[sequence-token-None]",
    kind="the sum is over documents, the count over rows",
)
_bug(
    "unknown_probabilities_spread",
    "meshwright.objectives.policy_loss",
    ".nan_to_num(nan=0.0).detach()",
    ".detach()",
    f"{_OBJECTIVES}::test_an_unknown_probability_of_another_engine_corrects_nothing",
    kind="NaN of one token in the loss of all",
)
_bug(
    "rest_of_nothing",
    "meshwright.objectives.functions",
    "log_probs_BSK.logsumexp(-1, keepdim=True).clamp(max=-1e-7)",
    "log_probs_BSK.logsumexp(-1, keepdim=True)",
    f"{_OBJECTIVES}::test_distillation_with_all_entries_is_the_whole_divergence[entry-1.0-0.0]",
    kind="the logarithm of what is 0, or below by rounding",
)
_bug(
    "absent_entries_taught",
    "meshwright.objectives.functions",
    "return ids_BSK, ids_BSK != IGNORED_LABEL",
    "return ids_BSK, ids_BSK > -1000",
    f"{_OBJECTIVES}::test_distillation_with_some_entries_knows_the_rest[entry-0.0]",
    kind="what stands for nothing is taken for something",
)
_bug(
    "target_unlikely",
    "meshwright.objectives.functions",
    "before_SS[:-1] &= ids_S != ids_S[1:, None]",
    "before_SS[:-1] &= ids_S >= 0",
    f"{_OBJECTIVES}::test_previous_tokens_are_the_latest_different_ones_of_the_document_without_the_target",
    kind="what is to be said is among what is not",
)
_bug(
    "kinder_error",
    "meshwright.objectives.heads",
    "error_BS.maximum(clipped_BS)",
    "error_BS.minimum(clipped_BS)",
    f"{_OBJECTIVES}::test_value_is_the_larger_of_the_clipped_and_the_plain_error[0.2]",
    kind="the smaller of two where the larger is meant",
)
_bug(
    "any_shape_of_column",
    "meshwright.objectives.base",
    "if not any(_fits(tuple(tensor.shape), shape) for shape in allowed):",
    "if not allowed:",
    f"{_OBJECTIVES}::test_a_column_without_its_last_position_is_told",
    kind="a column of another alignment is taken",
)
_bug(
    "objectives_of_any_module",
    "meshwright.objectives.registry",
    'found = import_class_from_path(path, kind=("function", "class"), base=Objective)',
    'found = __import__("importlib").import_module(path.rpartition(".")[0]).__dict__[path.rpartition(".")[2]]',
    f"{_OBJECTIVES}::test_what_is_no_objective_is_told[os.system-parts15-get_objective]",
    kind="a file names code to run",
)

# -- conversations

_CHAT = "tests/data/test_chat.py"
_bug(
    "prompt_of_other_tokens",
    "meshwright.data.encoding.drafts",
    "return index + len(prefix) if whole.ids[index : index + len(prefix)] == prefix else None",
    "return index + len(prefix)",
    f"{_CHAT}::test_an_answer_stands_behind_the_tokens_that_ask_for_it[chatml-chatml]",
    f"{_CHAT}::test_whatever_is_said_is_learnt_whole_and_alone[qwen]",
    kind="a token lies across the edge of an answer",
)
_bug(
    "bos_twice",
    "meshwright.data.encoding.drafts",
    "self.before if draft.opened and ids[: len(self.before)] != self.before else []",
    "self.before if draft.opened else []",
    f"{_CHAT}::test_a_text_has_special_tokens_as_its_tokenizer_adds_them_and_never_twice",
    kind="a token is added that is there",
)
_bug(
    "eos_twice",
    "meshwright.data.encoding.drafts",
    "if draft.closed and ids[-1:] != self.after[-1:] else []",
    "if draft.closed else []",
    f"{_CHAT}::test_a_text_has_special_tokens_as_its_tokenizer_adds_them_and_never_twice",
    f"{_CHAT}::test_an_eos_token_that_the_tokenizer_adds_is_not_added_twice",
    kind="a token is added that is there",
)
_bug(
    "end_of_the_text_for_the_turn",
    "meshwright.data.encoding.answers",
    "ends = [end for end in ends if end <= common] or ends[:1]",
    "ends = ends[-1:]",
    f"{_CHAT}::test_answers_and_what_ends_their_turns_are_learnt[phi3-phi3]",
    kind="what ends a text is taken for what ends a turn",
)
_bug(
    "answers_as_they_were_not_given",
    "meshwright.data.encoding.answers",
    "if not each.is_open and text.startswith(each.text[: each.span[1]])",
    "if not each.is_open",
    f"{_CHAT}::test_answers_and_what_ends_their_turns_are_learnt[qwen-qwen3]",
    f"{_CHAT}::test_thoughts_that_a_template_forgets_are_learnt_where_it_writes_them",
    kind="a mask of one text is laid on another",
)
_bug(
    "answers_without_an_end",
    "meshwright.data.encoding.answers",
    "is_open = bool(said) and",
    "is_open = bool(said) and False and",
    f"{_CHAT}::test_answers_and_what_ends_their_turns_are_learnt[base-alpaca]",
    kind="the model never learns to stop",
)
_bug(
    "all_marks_for_the_last",
    "meshwright.data.encoding.answers",
    "        if before:\n",
    "        if before < 0:\n",
    f"{_CHAT}::test_loss_on_says_which_answers_are_learnt",
    f"{_CHAT}::test_messages_may_be_prompts_and_completions",
    kind="more is learnt than was asked for",
)
_bug(
    "system_prompts_lost",
    "meshwright.data.encoding.answers",
    'if message["role"] != ANSWERS and',
    'if message["role"] == "user" and',
    f"{_CHAT}::test_what_a_template_cannot_write_is_told_with_its_place[forgetful--]",
    f"{_CHAT}::test_what_a_template_does_not_know_of_is_not_lost_in_silence",
    kind="a part of the input is left out in silence",
)
_bug(
    "templates_read_the_clock",
    "meshwright.data.encoding.chat_template",
    'if "strftime_now" not in template:',
    "if True:",
    f"{_CHAT}::test_a_template_does_not_know_what_day_it_is",
    kind="data that differ from day to day",
)
_bug(
    "prompts_are_learnt",
    "meshwright.data.encoding.conversations",
    "first = max(self.given, ",
    "first = max(0, ",
    f"{_CHAT}::test_messages_may_be_prompts_and_completions",
    kind="what is given is learnt",
)
_bug(
    "half_of_a_pair",
    "meshwright.data.encoding.lengths",
    "if together and len(kept) < len(documents):",
    "if together and not kept:",
    f"{_CHAT}::test_a_pair_is_kept_whole_or_not_at_all",
    kind="what belongs together is parted",
)
_bug(
    "first_token_learnt",
    "meshwright.data.encoding.lengths",
    "np.count_nonzero(self.labelled[1:])",
    "np.count_nonzero(self.labelled)",
    f"{_CHAT}::test_tokens_are_taken_as_they_are",
    kind="a document in which nothing is learnt is kept",
)
_bug(
    "moved_labels_pass",
    "meshwright.data.encoding.formats",
    "np.flatnonzero(learnt & (labels != ids))",
    "np.flatnonzero(learnt & (labels < 0))",
    f"{_CHAT}::test_what_is_wrong_with_a_record_is_told_with_its_place[labels moved by one]",
    kind="labels that the loss moves a second time",
)
_bug(
    "a_stream_is_shown_and_then_measured",
    "meshwright.cli.data",
    "        def feed() -> Feed:\n",
    "        from functools import cache\n\n        @cache\n        def feed() -> Feed:\n",
    "tests/data/test_data_show.py::test_what_was_shown_of_a_source_that_is_read_while_training_is_measured_too",
    kind="what goes forwards is read twice",
)
_bug(
    "text_is_padding",
    "meshwright.data.summary",
    "np.flatnonzero((ids != FILL) | (labels != IGNORED_LABEL))",
    "np.flatnonzero(labels != IGNORED_LABEL)",
    "tests/data/test_data_show.py::test_padding_is_no_text",
    kind="what is not learnt is not shown",
)
_bug(
    "questions_of_the_answer",
    "meshwright.data.reading.stdlib",
    "hashlib.blake2b(entry.name.encode(), digest_size=8)",
    "hashlib.blake2b(entry.text.encode(), digest_size=8)",
    "tests/data/test_stdlib_conversations.py::test_the_wording_hangs_on_the_name_alone",
    kind="data that differ where they should not",
)

# -- adapters in files

_ADAPTERS = "tests/model/test_adapter_files.py"
_ADAPTER_RUNS = "tests/model/test_adapter_runs.py"
_OTHERS = "tests/model/test_models_of_others.py"

_bug(
    "base_in_checkpoints",
    "meshwright.model.adapter_base",
    "return frozenset(found.names.keys() - trained)",
    "return frozenset()",
    f"{_ADAPTERS}::test_a_checkpoint_holds_the_adapter_alone_and_any_layout_goes_on_from_it[ddp]",
    kind="a base is saved again with every checkpoint of its adapter",
)
_bug(
    "trained_base_left_out",
    "meshwright.model.adapter_base",
    "return frozenset(found.names.keys() - trained)",
    "return frozenset(found.names.keys())",
    f"{_ADAPTERS}::test_what_is_trained_beside_adapters_is_not_lost",
    kind="what trains beside an adapter is in no checkpoint",
)
_bug(
    "fingerprint_of_names",
    "meshwright.model.adapter_base",
    "digest.update(value)",
    'digest.update(b"")',
    f"{_ADAPTERS}::test_a_base_that_has_moved_is_the_same",
    kind="another base of the same architecture passes for the same",
)
_bug(
    "any_base_loads",
    "meshwright.checkpoint.loading",
    'if saved is None or (known is not None and known.base.fingerprint == saved.get("fingerprint")):',
    "if saved is None or known is not None:",
    f"{_ADAPTERS}::test_another_base_is_refused",
    kind="an adapter goes on over another base",
)
_bug(
    "any_base_merges",
    "meshwright.checkpoint.merged_model",
    "if found != noted.fingerprint:",
    "if not found:",
    f"{_ADAPTERS}::test_another_base_is_refused",
    kind="an adapter is merged into another base",
)
_bug(
    "tied_weights_merged_into_both",
    "meshwright.checkpoint.merged_model",
    "if not torch.equal(self.read(name, value.dtype), self.read(other, value.dtype)):",
    "if value.dim() == 0:",
    f"{_ADAPTERS}::test_peft_loads_what_was_trained_and_merged_models_compute_it[dora-tied]",
    kind="one of two tied weights is adapted, and the merged model has one for both",
)
_bug(
    "merged_in_another_dtype",
    "meshwright.checkpoint.merged_model",
    "model, weights = open_pretrained(directory, config, dtype=dtype)",
    "model, weights = open_pretrained(directory, config, dtype=dtype or torch.float32)",
    f"{_ADAPTERS}::test_a_base_in_bfloat16_has_an_adapter_in_float32",
    kind="a base in bfloat16 is merged as if it had been in float32",
)
_bug(
    "adapter_names_a_scratch_directory",
    "meshwright.checkpoint.adapter_files",
    "config.base_model_name_or_path, config.revision = self._named[name]",
    "config.revision = self._named[name][1]",
    f"{_ADAPTER_RUNS}::test_a_run_leaves_an_adapter_that_peft_loads_and_goes_on_on_another_mesh",
    kind="the written adapter names a base that is not there",
)
_bug(
    "hub_base_by_its_cache",
    "meshwright.train.run.run_model",
    "named = str(path) if commit is not None else str(directory.resolve())",
    "named = str(directory.resolve())",
    f"{_OTHERS}::test_a_run_begins_with_a_model_of_the_hub_and_its_adapter_names_it",
    kind="a path of this machine in what is published",
)
_bug(
    "base_dtype_ignored",
    "meshwright.train.run.run_model",
    "return (self.adapters and self.adapters.base_dtype) or dtype_of(section)",
    "return dtype_of(section)",
    f"{_ADAPTER_RUNS}::test_a_run_begins_with_a_saved_adapter",
    kind="an option that does nothing",
)
_bug(
    "template_stays_behind",
    "meshwright.train.run.output",
    "tokenizer.chat_template = read_chat_template(config.data.chat_template)",
    "read_chat_template(config.data.chat_template)",
    f"{_ADAPTER_RUNS}::test_the_tokenizer_that_is_written_has_the_chat_template_of_the_run",
    kind="a tuned model is asked in another form than it was trained in",
)
_bug(
    "any_code_is_trusted",
    "meshwright.model.remote_code",
    "if found != trusted:",
    "if not found:",
    f"{_OTHERS}::test_code_of_a_model_runs_only_where_its_version_is_named",
    kind="code runs that nobody has read",
)
_bug(
    "code_of_another_place",
    "meshwright.model.remote_code",
    'if "--" in reference:',
    'if reference == "--":',
    f"{_OTHERS}::test_code_from_another_place_is_refused",
    kind="code runs of which no version is named",
)
_bug(
    "own_path_asked_of_the_hub",
    "meshwright.model.pretrained.hub",
    'if above != Path(".") and above.is_dir():',
    'if above == Path(".") and above.is_file():',
    f"{_OTHERS}::test_what_is_neither_here_nor_on_the_hub_is_told",
    kind="somebody else's model takes the place of a directory that is missing",
)
_bug(
    "each_rank_its_own_commit",
    "meshwright.model.pretrained.hub",
    "return world.together(lambda: find(commit or revision))",
    "return world.together(lambda: find(None))",
    f"{_OTHERS}::test_all_ranks_take_the_commit_that_the_first_one_finds",
    kind="a revision that is not the one asked for",
)
_bug(
    "misspelt_targets_pass",
    "meshwright.model.adapter_options",
    'if not any(name == each or name.endswith(f".{each}") for name in known):',
    'if not any(name.endswith(f".{other}") for name in known for other in wanted):',
    f"{_ADAPTER_RUNS}::test_what_cannot_be_is_told_before_anything_starts[a module that is none]",
    kind="a misspelt module is not adapted, and nobody is told",
)
_bug(
    "changed_bases_pass",
    "meshwright.model.adapter_options",
    '_INITIALISATIONS = (True, False, "gaussian", "orthogonal")',
    '_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "pissa")',
    f"{_ADAPTER_RUNS}::test_what_cannot_be_is_told_before_anything_starts[a changed base]",
    kind="an adapter of a base that nobody has",
)
_bug(
    "conflicts_pass",
    "meshwright.model.adapter_options",
    "if _plain(before) != _plain(now):",
    "if type(before) is not type(now):",
    f"{_ADAPTER_RUNS}::test_a_saved_adapter_is_what_its_own_files_say",
    kind="a setting of the run file that is silently another",
)


# -- adapters

_ADAPTERS = "tests/model/test_adapters.py"
_bug(
    "whole_matrices_get_a_part",
    "meshwright.parallel.tensor.adapters",
    "whole = PARTIAL if divides_out or divides_in else style",
    'whole = "replicate" if divides_out or divides_in else style',
    f"{_ADAPTERS}::test_adapters_train_as_in_one_process[all-linear-sequence]",
    kind="gradients of what each rank uses for a part are not summed",
)
_bug(
    "masks_of_the_first_part",
    "meshwright.parallel.tensor.adapters",
    "mask.narrow(-1, sum(sizes[: parallel.rank]), sizes[parallel.rank])",
    "mask.narrow(-1, 0, sizes[parallel.rank])",
    f"{_ADAPTERS}::test_dropout_before_a_divided_adapter_falls_as_in_one_process[False]",
    kind="ranks drop the same elements of different parts",
)
_bug(
    "norms_of_a_part",
    "meshwright._compat.peft",
    "return summed(found.detach().square()).sqrt() if is_active() else found",
    "return found",
    f"{_ADAPTERS}::test_adapters_train_as_in_one_process[dora-tp]",
    kind="a norm over ranks is that of each rank's part",
)
_bug(
    "adapters_of_the_first_experts",
    "meshwright._compat.peft",
    "mine = slice(first, first + weight.shape[0])",
    "mine = slice(0, weight.shape[0])",
    f"{_ADAPTERS}::test_adapters_train_as_in_one_process[experts-ep]",
    kind="each rank adds to its experts what is the first ones'",
)
_bug(
    "containers_are_called",
    "meshwright_pipeline.cut.trial_runs",
    "reads = any(isinstance(each, nn.ParameterDict | nn.ParameterList) and len(each) for each in module.children())",
    "reads = False",
    f"{_ADAPTERS}::test_adapters_train_as_in_one_process[embedding-pp]",
    kind="parameters that a module reads from a container are taken from it",
)
_bug(
    "adapters_of_any_seed",
    "meshwright.model.adapter",
    "        torch.manual_seed(seed)\n        adapted",
    "        adapted",
    f"{_ADAPTERS}::test_shards_of_a_base_in_bfloat16_train_an_adapter_in_float32[tp]",
    kind="what is drawn differs between ranks",
)
_bug(
    "originals_in_place_of_copies",
    "meshwright._compat.peft",
    'chosen = f"modules_to_save.{module.active_adapters[0]}." if module.active_adapters else "original_module."',
    'chosen = "original_module."',
    f"{_ADAPTERS}::test_merged_parameters_are_those_that_peft_merges[saved modules-pp]",
    kind="an engine gets the weights that were not trained",
)
_bug(
    "tied_factors_apart",
    "meshwright._compat.peft_tying",
    "factors[name] = TransposedFactor(other[name])",
    "factors[name] = TransposedFactor(nn.Parameter(other[name].detach().clone()))",
    f"{_ADAPTERS}::test_tied_factors_get_the_gradients_of_both_layers_that_peft_gives_them",
    kind="what is one parameter is trained as two",
)
_bug(
    "tied_factors_the_wrong_way_around_in_files",
    "meshwright.checkpoint.adapter_files",
    "read[key] = value.t().contiguous() if is_transposed(named[key]) else value",
    "read[key] = value",
    "tests/model/test_adapter_files.py::test_peft_loads_what_was_trained_and_merged_models_compute_it[tied factors-tied]",
    kind="a file has a factor as we hold it, and not as peft does",
)
_bug(
    "tokens_stay_apart",
    "meshwright._compat.peft",
    '_WRAPPED = ("base_layer", "original_module", "token_adapter")',
    '_WRAPPED = ("base_layer", "original_module")',
    "tests/model/test_adapter_files.py::test_single_tokens_that_are_trained_are_merged[untied]",
    kind="merged parameters have names that the base does not know",
)
_bug(
    "ends_of_turns_twice",
    "meshwright.data.encoding.answers",
    "if self._template.ends(content) and re.search(ended, text):",
    "if not content and re.search(ended, text):",
    f"{_CHAT}::test_what_ends_a_turn_is_not_there_twice[llama3]",
    kind="a token is added that is there",
)
_FABRIC = "plugins/fabric/tests/test_fabric.py"
_MEANT = f"{_FABRIC}::test_what_cannot_be_meant_is_refused_on_all_ranks"
_bug(
    "a_scaled_loss_is_taken",
    "meshwright_fabric.step",
    "if float(factor) != 1.0:",
    "if float(factor) == 0.0:",
    f"{_MEANT}[scaled]",
    kind="a factor of the loss is dropped without a word",
)
_bug(
    "steps_without_backward",
    "meshwright_fabric.strategy",
    "if module.is_backward_due:",
    "if options:",
    f"{_MEANT}[no_backward]",
    kind="a step is made of gradients that were not asked for",
)
_bug(
    "rows_by_rank",
    "meshwright_fabric.strategy",
    '{"num_replicas": self.mesh.data_size, "rank": self.mesh.data_rank}',
    '{"num_replicas": self.world_size, "rank": self.global_rank}',
    f"{_FABRIC}::test_ranks_that_share_a_batch_get_the_same_rows",
    kind="ranks that share a batch draw different ones",
)
_bug(
    "groups_of_the_first",
    "meshwright_fabric.strategy",
    '[{**each, "params": []} for each in options]',
    '[{**options[0], "params": []} for each in options]',
    f"{_FABRIC}::test_fabric_trains_as_one_process[fsdp2]",
    kind="all groups of an optimizer get the settings of one",
)
_bug(
    "steps_begin_anew",
    "meshwright_fabric.strategy",
    "self.steps = manifest.step",
    "self.steps = 0",
    f"{_FABRIC}::test_a_checkpoint_goes_on_under_another_layout[fsdp2-tp]",
    kind="a run that goes on counts its steps from 0",
)
_bug(
    "evaluation_trains",
    "meshwright_fabric.step",
    "if not torch.is_grad_enabled():",
    "if self.is_backward_due:",
    f"{_FABRIC}::test_a_call_without_gradients_evaluates_and_leaves_none",
    kind="an evaluation leaves gradients",
)

# -- jobs, and stopping

_STOPPING = "tests/train/test_stopping.py"
_JOBS = "tests/cluster/test_launch_files.py"
_bug(
    "signals_unheard_by_peers",
    "meshwright.train.loop.ahead",
    "noted = 0 if self._signals is None else self._signals.noted",
    "noted = 0",
    f"{_STOPPING}::test_a_loop_stopped_in_a_pass_by_a_signal_to_one_rank_goes_on_there[counted]",
    kind="a signal to one rank stops none",
)
_bug(
    "one_signal_for_two",
    "meshwright.base.stopping",
    "SAME_S = 2.0",
    "SAME_S = 0.0",
    f"{_STOPPING}::test_a_second_signal_ends_a_rank_that_waits_for_a_peer_and_one_that_comes_twice_does_not",
    kind="a signal that a scheduler and a launcher both send kills a rank that is saving",
)
_bug(
    "stops_where_it_was_saved_before",
    "meshwright.train.loop.fit",
    "if checkpointer.saved != step:",
    "if checkpointer.saved is None:",
    f"{_STOPPING}::test_a_run_stopped_time_and_again_ends_as_one_that_was_not",
    kind="steps since the last checkpoint are lost when a run is stopped",
)
_bug(
    "server_dies_of_signals",
    "meshwright.launch.interruptible",
    "        signal.signal(number, signal.SIG_IGN)",
    "        pass",
    f"{_STOPPING}::test_a_run_stopped_time_and_again_ends_as_one_that_was_not",
    kind="a signal to all processes ends the one that tells how the ranks have ended",
)
_bug(
    "failed_jobs_queue_again",
    "meshwright.clusters.slurm",
    'if [ "$code" -eq {stopped} ]; then',
    'if [ "$code" -ne 0 ]; then',
    f"{_JOBS}::test_a_batch_script_is_shell_in_which_nothing_is_replaced_that_was_given",
    kind="a job that cannot run is queued for ever",
)
_bug(
    "pods_die_before_ranks",
    "meshwright.clusters.kubernetes",
    '"terminationGracePeriodSeconds": job.kill_after_s,',
    '"terminationGracePeriodSeconds": 30,',
    f"{_JOBS}::test_pods_have_storage_and_more_time_than_torchrun_gives_the_ranks[JobSet]",
    kind="a machine is gone before its ranks have saved",
)
_bug(
    "each_machine_its_own_checkpoints",
    "meshwright.clusters.job",
    'shared = launch.nodes > 1 or to in ("kubernetes", "skypilot")',
    'shared = to in ("kubernetes", "skypilot")',
    f"{_JOBS}::test_what_the_cluster_could_not_run_is_refused[a relative directory]",
    kind="checkpoints of several machines lie on each one's own disk",
)

# -- trainers

_HEADS = "tests/step/test_heads.py"
_bug(
    "any_rank_scores_a_sequence",
    "meshwright.parallel.context.positions",
    "second_B = 2 * share.size - 1 - every_RB.argmax(0)",
    "second_B = 2 * share.size - 1 - every_RB.argmin(0)",
    f"{_HEADS}::test_rewards_of_sequences_train_as_on_one_rank[cp]",
    kind="what is taken of the last token is taken of another",
)
_bug(
    "any_pooling_under_cp",
    "meshwright.parallel.context.probe",
    "(([position], True), (others, False)):",
    "(([position], True),):",
    f"{_HEADS}::test_what_a_head_cannot_do_is_told_on_all_ranks_before_the_first_step[cp, of all tokens]",
    kind="a model that is divided computes something else",
)
_bug(
    "rows_of_adapters_cut",
    "meshwright_megatron_fsdp._compat.wrapping",
    "    _keep_rows_whole(model, mesh, theirs, units)\n",
    "",
    "tests/model/test_adapters.py::test_adapters_train_as_in_one_process[widths-megatron]",
    kind="a shard holds a part of a row",
)

# -- launchers

_LAUNCHERS = "tests/launch/test_launchers.py"
_bug(
    "launchers_may_disagree",
    "meshwright.launch.join",
    "if not (inner.is_same(outer) or inner.is_within(outer)):",
    "if False:",
    f"{_LAUNCHERS}::test_a_contradiction_names_both_with_their_values_and_what_to_unset[by hand in Slurm]",
    kind="two launchers disagree, and ranks wait for others that do not exist",
)
_bug(
    "half_of_another_world",
    "meshwright.launch.join",
    "if name in environment and number(environment, name) != value:",
    "if False:",
    f"{_LAUNCHERS}::test_a_contradiction_names_both_with_their_values_and_what_to_unset[one of them by hand]",
    kind="a rank of one launcher is mixed with the size of another",
)
_bug(
    "torchrun_within_tasks_is_refused",
    "meshwright.launch.join",
    'if has_rank and has_size and "TORCHELASTIC_RUN_ID" in environment:',
    "if False:",
    "tests/launch/test_slurm.py::test_everything_else_is_left_alone[torchrun within a step]",
    kind="torchrun in a task of each node is taken for a contradiction",
)
_bug(
    "nobody_listens_there",
    "meshwright.launch.mpi",
    'if number(environment, "OMPI_COMM_WORLD_RANK") == 0 and daemon is not None and daemon[1] != "0":',
    "if False:",
    f"{_LAUNCHERS}::test_rank_0_that_is_not_where_mpirun_runs_says_what_to_set",
    kind="ranks look for their store on a node where it is not",
)
_bug(
    "places_and_ranks_are_exchanged",
    "meshwright.launch.mpi",
    "size, rank, local_rank, local_size = (number(environment, name) for name in names)",
    "size, local_rank, rank, local_size = (number(environment, name) for name in names)",
    f"{_LAUNCHERS}::test_ranks_of_open_mpi_get_their_places",
    kind="the number of a rank on its node is taken for its rank",
)
_bug(
    "pods_are_taken_for_ranks",
    "meshwright.launch.pods",
    'if is_node and "LOCAL_RANK" not in environment:',
    "if False:",
    f"{_LAUNCHERS}::test_a_pod_that_is_no_rank_is_not_taken_for_one[PyTorchJob]",
    kind="the index of a pod is taken for a rank, and the world waits for ranks that nobody starts",
)
_bug(
    "the_other_ranks_keep_silent",
    "meshwright.files.commands",
    'if self._everywhere or os.environ.get("LOCAL_RANK", "0") == "0":',
    'if os.environ.get("LOCAL_RANK", "0") == "0":',
    f"{_LAUNCHERS}::test_each_rank_says_what_contradicts_whatever_its_place",
    kind="a rank that alone is wrong ends without a word",
)

# -- plugins/trainer: arguments

_bug(
    "selective_is_full",
    "meshwright_trainer.arguments",
    '"selective" if selects else True',
    "True",
    f"{_ARGUMENTS}::test_precision_and_recomputation_are_options_of_the_strategy",
    kind="an option is taken for a coarser one",
)
_bug(
    "elements_are_not_looked_at",
    "meshwright_trainer.arguments",
    "value if isinstance(value, (list, tuple, Mapping)) else [value]",
    "[value]",
    f"{_ARGUMENTS}::test_a_refused_argument_is_refused_by_name_with_the_way_to_go[include_for_metrics]",
    kind="a value within a list is not refused",
)
_bug(
    "one_rank_for_several",
    "meshwright_trainer.arguments",
    "args.world_size == 1",
    "args.world_size <= 2",
    f"{_ARGUMENTS}::test_a_refused_argument_is_refused_by_name_with_the_way_to_go[average_tokens_across_devices]",
    kind="what ranks cannot agree on is refused on one of them alone, or on none",
)
_bug(
    "overrides_are_dropped",
    "meshwright_trainer.arguments",
    "    _check_methods(trainer)\n",
    "",
    f"{_ARGUMENTS}::test_a_method_that_would_never_be_called_is_refused[create_optimizer]",
    kind="a user's method is never called, without a word",
)
_bug(
    "own_router_loss",
    "meshwright_trainer.arguments",
    "            text.router_aux_loss_coef = trainer.router_aux_loss_coef\n",
    "",
    f"{_ACTS}[dpo_moe-router_aux_loss_coef=0.5]",
    kind="an argument gives way to the model's configuration",
)
_bug(
    "loss_for_logits",
    "meshwright_trainer.stand_in",
    "else self._answer.without_labels()",
    "else self._answer",
    f"{_ACTS}[sft-label_smoothing_factor=0.2]",
    kind="a model that is called without labels gives a loss first",
)

# -- plan

_PLANNED = "tests/plan/test_plan.py::test_a_plan_is_what_real_ranks_do"
_bug(
    "resized_memory_stays",
    "meshwright.testing.meter",
    "        for tell in self.watchers:\n            tell(self)\n",
    "",
    "tests/model/test_memory.py::test_one_meter_within_another_does_not_end_it",
    kind="memory that is given back without an operation is counted on",
)
_bug(
    "known_numbers_are_not_computed",
    "meshwright.plan.world",
    "            return found[0], choices(found[1].shape, given[0].shape[-1], self._imbalance)\n",
    "            return found[0], found[1].zero_()\n",
    f"{_PLANNED}[fsdp2-2ranks-qwen3_moe]",
    kind="what follows from a choice is not known, and a plan of experts ends in a raw error",
)
_bug(
    "rows_of_all_for_one",
    "meshwright.plan.world",
    "        mine = mine[members.rank() * part : (members.rank() + 1) * part]\n",
    "",
    "tests/plan/test_plan.py::test_each_rank_of_a_planned_world_has_what_this_one_has",
    kind="a rank is taken to receive other rows than its peers send it",
)
_bug(
    "last_rank_untraced",
    "meshwright.plan.planned",
    "return sorted({*found, _rank(last, degrees)})",
    "return sorted(found)",
    "tests/plan/test_plan.py::test_ranks_that_stand_for_all[sizes0-8-ranks0]",
    kind="the rank that has the least, or the most, is not looked at",
)
_bug(
    "streams_share_memory",
    "meshwright.plan.allocator",
    "self._of[block] = self._segments[stream, is_small]",
    'self._of[block] = self._segments.setdefault(("", is_small), self._segments[stream, is_small])',
    "tests/plan/test_plan_allocator.py::test_streams_do_not_share_memory",
    kind="memory of one stream is planned to be reused on another",
)
_bug(
    "collectives_run_ahead",
    "meshwright.plan.time",
    "start = max(self.host, self.free[stream], ready, after)",
    "start = max(self.host, self.free[stream], after)",
    "tests/plan/test_plan_time.py::test_a_collective_waits_for_what_it_sends",
    kind="a message leaves before it is made",
)
_bug(
    "fusion_writes_all",
    "meshwright.plan.kernels",
    "if last[block] >= end)",
    "if block not in reads)",
    "tests/plan/test_plan_time.py::test_fused_operators_read_and_write_what_others_see",
    kind="compiled code is planned to write what nobody reads",
)
_bug(
    "backend_memory_counted",
    "meshwright.plan.meter",
    "        if id(storage) not in self._foreign:\n            super().take_up(storage)",
    "        super().take_up(storage)",
    f"{_PLANNED}[megatron_fsdp-2ranks]",
    kind="what gloo holds for itself is taken for memory of a step",
)
_bug(
    "used_by_none_in_a_plan",
    "meshwright.manager.ending",
    "            used = self._own_used\n",
    "            pass\n",
    f"{_PLANNED}[megatron_fsdp-2ranks]",
    kind="a plan drops all gradients, and its optimizer has no state",
)
_bug(
    "weights_put_off_in_no_plan",
    "meshwright._compat.planning",
    "in (Tensor, nn.Parameter, FakeTensor)",
    "in (Tensor, nn.Parameter)",
    f"{_PLANNED}[fsdp2-pp_size=2-pp_schedule=InterleavedZeroBubble-microbatches=4-2ranks]",
    kind="a plan computes the gradients of weights at once, where real ranks put them off",
)
_bug(
    "bytes_gathered_twice_in_a_plan",
    "meshwright.plan.world",
    "if name_of(func) == _COPIES_IN and",
    "if False and",
    f"{_PLANNED}[fsdp2-adapters-2ranks]",
    kind="a plan has one more buffer for each unit that FSDP gathers as bytes",
)

_bug(
    "peaks_while_threads_let_go",
    "meshwright.plan.meter",
    "if self._is_real and",
    "if not self._is_real and",
    f"{_HELD_BY_THREADS}[planned]",
    kind="what is measured depends on when a thread of the backend gets a core",
)
_bug(
    "threads_at_work_are_idle",
    "meshwright.mesh.gloo_threads",
    'state != "S"',
    'state == "X"',
    f"{_HELD_BY_THREADS}[measured]",
    kind="what is measured depends on when a thread of the backend gets a core",
)

# -- signals and jobs, again

_bug(
    "forks_speak_for_their_parent",
    "meshwright.base.stopping",
    "        os.register_at_fork(after_in_child=self._leave_to_parent)\n",
    "",
    f"{_STOPPING}::test_processes_that_are_forked_have_signals_of_their_own_and_hold_up_nobody",
    kind="a signal to a process that a rank has forked stops the run",
)
_bug(
    "forks_hold_the_pipe",
    "meshwright.base.stopping",
    "        os.write(self._writer, _END)\n        self._thread.join()\n        os.close(self._writer)\n",
    "        os.close(self._writer)\n        self._thread.join()\n",
    f"{_STOPPING}::test_processes_that_are_forked_have_signals_of_their_own_and_hold_up_nobody",
    kind="a rank waits for ever for the processes that it has forked",
)
_bug(
    "nobody_hears_the_second",
    "meshwright.base.stopping",
    "with suppress(OSError):  # nobody",
    "with suppress(KeyError):  # nobody",
    f"{_STOPPING}::test_processes_that_are_forked_have_signals_of_their_own_and_hold_up_nobody",
    kind="a thread that reads signals ends when what it says cannot be written",
)
_bug(
    "signals_that_are_none",
    "meshwright.base.stopping",
    "if name not in _NAMES",
    "if False",
    f"{_STOPPING}::test_signals_that_cannot_be_noted_are_refused[names1]",
    kind="a raw error of the interpreter for a wrong name",
)
_bug(
    "tokenizing_dies_first",
    "meshwright.data.encoding.worker",
    "signal.SIGTERM, signal.SIGHUP",
    "signal.SIGHUP",
    f"{_STOPPING}::test_what_tokenizes_outlives_a_signal_to_all_processes",
    kind="a signal to all processes fails a run that was to save",
)
_bug(
    "failed_jobs_queue_for_ever",
    "meshwright.clusters.slurm",
    'trap "" TERM; ',
    "",
    f"{_JOBS}::test_a_batch_script_is_shell_in_which_nothing_is_replaced_that_was_given",
    kind="a job that has failed is queued again, without end",
)
_bug(
    "a_step_asks_for_no_cpus",
    "meshwright.clusters.slurm",
    '"--kill-on-bad-exit=1", *cpus',
    '"--kill-on-bad-exit=1"',
    f"{_JOBS}::test_a_batch_script_is_shell_in_which_nothing_is_replaced_that_was_given",
    kind="all threads of a rank share one CPU",
)
_bug(
    "a_job_over_as_it_begins",
    "meshwright.clusters.job",
    "launch.time_limit_s <= launch.grace_s + _EARLY_S",
    "launch.time_limit_s <= launch.grace_s",
    f"{_JOBS}::test_what_the_cluster_could_not_run_is_refused[a job that is over as it begins]",
    kind="a job is queued again and again, and trains nothing",
)
_bug(
    "services_begin_with_digits",
    "meshwright.clusters.job",
    "plain if plain[:1].isalpha()",
    "plain if plain",
    f"{_JOBS}::test_a_job_is_called_what_each_cluster_takes[7B llama-run-7b-llama]",
    kind="a name that a cluster refuses",
)
_bug(
    "ray_removes_checkpoints",
    "meshwright.clusters.job",
    '(shared or to == "ray") and not',
    "shared and not",
    f"{_JOBS}::test_one_machine_may_use_its_own_disk",
    kind="checkpoints lie in a copy of a directory that is removed",
)
_bug(
    "one_rank_starts_four",
    "meshwright.clusters.job",
    '({"nproc": 1} if',
    "({} if",
    f"{_JOBS}::test_a_single_rank_does_not_start_others",
    kind="a job has other ranks than were checked",
)
_bug(
    "leaving_is_ended",
    "meshwright.train.loop.fit",
    "        signals.settle()\n",
    "",
    f"{_STOPPING}::test_a_rank_that_leaves_is_not_ended_by_what_its_launcher_sends_when_another_has_left",
    kind="a run that was stopped leaves with a code that says that it was not",
)
_bug(
    "places_are_not_read_as_counts",
    "meshwright.launch.join",
    'return number(os.environ, "LOCAL_RANK", 0)',
    'return int(os.environ.get("LOCAL_RANK", "0"))',
    f"{_LAUNCHERS}::test_ranks_that_see_several_devices_have_to_know_their_place",
    kind="a raw error of the interpreter for a wrong variable",
)

# -- resuming, and models that score sequences

_SCHEDULED = f"{_FABRIC}::test_a_schedule_goes_on_where_ranks_have_other_groups"
_bug(
    "milestones_are_words",
    "meshwright.checkpoint.schedule",
    'if isinstance(state.get("milestones"), Mapping):',
    "if False:",
    f"{_SCHEDULED}[single-pp-steps]",
    kind="JSON makes words of numbers, and what counts by number finds nothing",
)
_bug(
    "rates_of_the_first_ranks_groups",
    "meshwright_fabric.strategy",
    "together(partial(load_schedule, value, saved))",
    "value.load_state_dict(saved)",
    f"{_SCHEDULED}[single-pp-of its start]",
    kind="state that is by group is given to a rank with other groups",
)
_bug(
    "tensors_stay_written",
    "meshwright_fabric.strategy",
    "decoded(together(lambda: read_manifest(Path(path))).extra)",
    "dict(read_manifest(Path(path)).extra)",
    f"{_SCHEDULED}[single-pp-steps]",
    kind="a value comes back in the form in which it was stored",
)
_bug(
    "moments_are_dropped",
    "meshwright_fabric.strategy",
    "if optimizer.state:",
    "if False:",
    f"{_FABRIC}::test_what_cannot_be_meant_is_refused_on_all_ranks[stepped]",
    kind="state that the user has made is lost without a word",
)
_bug(
    "last_position_without_padding",
    "meshwright.parallel.context.probe",
    "for given in (ids, padded):",
    "for given in (ids,):",
    f"{_HEADS}::test_what_a_head_cannot_do_is_told_on_all_ranks_before_the_first_step[cp, of the last position]",
    kind="a check is made on inputs that do not tell two cases apart",
)
_bug(
    "small_rows_by_all_widths",
    "meshwright_megatron_fsdp._compat.wrapping",
    "if shapes[index].numel() >= between:",
    "if True:",
    "tests/model/test_adapters.py::test_adapters_train_as_in_one_process[rank_one-megatron]",
    kind="what another package does is reckoned otherwise than it reckons",
)
_bug(
    "models_for_two",
    "meshwright.manager.data_parallel",
    "        take(model.modules())\n",
    "",
    "tests/model/test_taken_models.py::test_a_model_of_another_manager_is_refused_on_every_rank[ddp bucketed]",
    kind="a model under two managers, whose gradients come back as 0",
)
_bug(
    "stages_for_two",
    "meshwright_pipeline.manager",
    "check_new(model, has_model=self._model is not None)",
    "check_new(nn.Module(), has_model=self._model is not None)",
    "tests/model/test_taken_models.py::test_a_model_of_another_manager_is_refused_on_every_rank[pipeline]",
    kind="a model that was taken apart is taken again",
)
_bug(
    "wrapped_model_stays_wrapped",
    "meshwright_trainer.accelerator",
    "    def no_sync(",
    "    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:\n        return model\n\n    def no_sync(",
    "plugins/trainer/tests/test_theirs.py::test_the_accelerator_unwraps_what_torch_has_wrapped",
    kind="a model is given back within torch's wrapper",
)
_bug(
    "arguments_before_there_are_any",
    "meshwright_trainer.grpo",
    "        self.args = arguments_among([*args, *kwargs.values()])\n",
    "",
    "tests/docs/test_coming_from.py::test_the_trainer_of_completions_goes_on_where_the_script_of_trl_ends",
    kind="a trainer of completions takes no path",
)
_bug(
    "any_directory_is_a_checkpoint",
    "meshwright_trainer._compat",
    "        check_directory(Path(resume_from_checkpoint))\n",
    "        pass\n",
    "plugins/trainer/tests/test_theirs.py::test_a_checkpoint_that_is_not_there_is_refused_by_its_name",
    kind="a checkpoint that is not there ends in an error of the library below",
)

# -- plugins/trainer: data, models and losses

_bug(
    "base_for_an_adapter_as_the_reference",
    "meshwright_trainer._compat",
    'switch, value = ("_active_adapter", [REFERENCE]) if has_copy else ("_disable_adapters", True)',
    'switch, value = ("_disable_adapters", True)',
    "plugins/trainer/tests/test_trained_adapters.py"
    "::test_the_reference_of_an_adapter_that_was_trained_is_the_adapter_as_it_was[DPO]",
    kind="a loss takes another model for the reference than TRL does",
)
_INPUTS = "plugins/trainer/tests/test_inputs.py"
_bug(
    "any_tokens_have_one_answer",
    "meshwright_trainer.stand_in",
    "if not isinstance(ids, Tensor) or not torch.equal(ids, self._ids):",
    "if not isinstance(ids, Tensor):",
    f"{_INPUTS}::test_a_loss_that_calls_the_model_with_other_tokens_is_refused[Other]",
    kind="what was computed of some tokens is given for others",
)
_bug(
    "masked_models_are_shifted",
    "meshwright_trainer.arguments",
    "if not usual or getattr",
    "if getattr",
    f"{_INPUTS}::test_a_model_that_does_not_predict_the_next_token_is_refused[masked]",
    kind="labels of one meaning are trained on as those of another",
)
_bug(
    "inputs_are_left_out",
    "meshwright_trainer.mixin",
    "            self._check_inputs(inputs)\n",
    "",
    f"{_INPUTS}::test_what_the_model_would_not_be_given_is_refused[inputs_embeds]",
    kind="a part of a batch is left out, without a word",
)
_bug(
    "streams_are_filled_up",
    "meshwright_trainer.accelerator",
    'and not self.even_batches and getattr(stream, "n_shards", 0) < count:',
    "and count < 0:",
    f"{_INPUTS}::test_rows_of_streams_are_dealt_out_once_and_ranks_end_together",
    kind="rows are evaluated twice",
)
_bug(
    "streams_end_apart",
    "meshwright_trainer.mixin",
    "dist.ReduceOp.MIN)[0]:",
    "dist.ReduceOp.MAX)[0]:",
    f"{_INPUTS}::test_rows_of_streams_are_dealt_out_once_and_ranks_end_together",
    kind="ranks take unequally many batches",
)
_bug(
    "any_trainer_of_trl",
    "meshwright_trainer.arguments",
    "    _check_trainer(trainer)\n",
    "",
    f"{_INPUTS}::test_a_trainer_whose_batches_are_not_known_is_refused[KTOTrainer]",
    kind="what is not known is not refused by name",
)
_bug(
    "buckets_for_all_that_are_small",
    "meshwright_megatron_fsdp._compat.wrapping",
    "if any((cut - begin) % row for cut in cuts):",
    "if row > 1 and place.size < between:",
    "plugins/megatron_fsdp/tests/test_megatron_fsdp_options.py::test_overlap_grad_reduce_decides_whether_backward_reduces[False-expected1]",
    kind="more messages than are needed",
)
_bug(
    "stages_evaluate_other_rows",
    "meshwright_trainer.grpo",
    'trainer.args.eval_strategy != "no" and evaluated != train',
    "False",
    "plugins/trainer/tests/test_grpo.py::test_what_cannot_be_honoured_is_refused_by_name_before_training[pp eval]",
    kind="what cannot be is found out in the middle of a run",
)
_bug(
    "ranks_of_a_launcher_are_not_refused",
    "meshwright.train.run.run_rank",
    "            world.raise_together(companion.refusal if companion is not None else None)\n",
    "",
    "tests/plan/test_plan_beside.py::test_ranks_of_a_launcher_are_refused_together",
    kind="what cannot fit is begun",
)
_bug(
    "the_meter_comes_late",
    "meshwright.train.run.run_rank",
    "    return nullcontext() if companion is None or mesh.rank else companion.seeing()",
    "    return nullcontext()",
    "tests/plan/test_plan_beside.py::test_a_run_holds_and_sends_what_was_planned[ddp]",
    kind="memory that was there before is not counted",
)
_bug(
    "buckets_are_laid_out_anew_in_plans",
    "meshwright_ddp.manager",
    "self.settles_after = 2",
    "self.settles_after = 1",
    "tests/plan/test_plan_beside.py::test_a_run_holds_and_sends_what_was_planned[ddp]",
    kind="a step that is not as all others stands for them",
)
_bug(
    "wide_sums_stay",
    "meshwright_ddp.hooks",
    "buffer.copy_(_after(done, wide))",
    "_after(done, wide).to(buffer.dtype)",
    "tests/plan/test_plan_beside.py::test_a_run_holds_and_sends_what_was_planned[ddp]",
    kind="what has been used is held until the next step",
)
_bug(
    "averages_weigh_nothing",
    "meshwright.plan.trace",
    "            EMA(manager, job.ema)\n",
    "            pass\n",
    "tests/plan/test_plan_beside.py::test_a_run_holds_and_sends_what_was_planned[bucketed]",
    kind="a part of what a run holds is left out of its plan",
)
_PICTURES = "tests/plan/test_plan_pictures.py"
_bug(
    "first_of_equal_peaks",
    "meshwright.plan.pictures.series",
    "max(place for place, each in enumerate(totals) if each == largest)",
    "min(place for place, each in enumerate(totals) if each == largest)",
    f"{_PICTURES}::test_of_moments_that_hold_the_same_the_last_is_the_peak_as_in_the_trace",
    kind="a picture names another operator than the table",
)
_bug(
    "bars_over_phases",
    "meshwright.plan.pictures.series",
    "span.phase != group[0].phase or ",
    "",
    f"{_PICTURES}::test_bars_of_several_spans_have_their_ends_and_their_sum[one-200]",
    kind="what is drawn together is not alike",
)
_bug(
    "groups_cut_by_nodes_are_inside",
    "meshwright.plan.pictures.mesh_map",
    "(outer <= node and node % outer == 0)",
    "outer <= node",
    f"{_PICTURES}::test_levels_of_the_map_hold_all_ranks_and_are_on_their_links[dp_shard=5 x tp=3-root]",
    kind="right where sizes divide",
)
_bug(
    "rails_not_shared",
    "meshwright.plan.links",
    "rounds * size * (nodes - 1) / nodes / here",
    "rounds * size * (nodes - 1) / nodes",
    f"{_PICTURES}::test_bytes_over_links_are_those_that_take_the_time[nodes-all_gather]",
    kind="bytes told are not those that are timed",
)
_bug(
    "memory_as_operators_end",
    "meshwright.plan.pictures.series",
    "yield spans[place].start",
    "yield spans[place].end",
    f"{_PICTURES}::test_moments_are_when_their_operators_begin_to_compute",
    kind="what is held while something waits is drawn as what comes after",
)
_bug(
    "no_phase_is_backward",
    "meshwright.plan.meter",
    'return "backward" if in_backward() else "forward"',
    'return "forward"',
    f"{_PICTURES}::test_operators_are_of_the_phase_in_which_they_run[one]",
    kind="two phases are told as one",
)
_CALIBRATE = "tests/plan/test_plan_calibrate.py"
_bug(
    "hosts_issue_while_they_compute",
    "meshwright.plan.time",
    "self.host = end if self.device.is_host else self.host",
    "self.host = self.host",
    f"{_CALIBRATE}::test_a_host_issues_a_collective_when_it_has_computed",
    kind="what is planned to overlap does not",
)
_bug(
    "collectives_take_nothing_of_the_device",
    "meshwright.plan.time",
    "if speed == 1 or not left:",
    "if speed <= 1:",
    f"{_CALIBRATE}::test_a_device_computes_less_beside_collectives[0.5-12]",
    kind="what is planned to overlap does not",
)
_bug(
    "bandwidth_below_what_was_reached",
    "meshwright.plan.calibration.fit",
    "bandwidth = max(rate, link.bandwidth)",
    "bandwidth = link.bandwidth",
    f"{_CALIBRATE}::test_a_bandwidth_stays_where_less_is_reached",
    kind="a number that was measured is cut off",
)
_bug(
    "streams_by_their_mean_rate",
    "meshwright.plan.calibration.calibrate",
    "stream = len(streams) / sum(1 / rate for rate in streams)",
    "stream = sum(streams) / len(streams)",
    f"{_CALIBRATE}::test_a_file_says_what_was_measured_and_what_was_not",
    kind="rates are averaged in the place of times",
)
_bug(
    "groups_across_nodes_are_neighbours",
    "meshwright.plan.calibration.measure",
    "mesh.get_group(0 if is_across else 1)",
    "mesh.get_group(1)",
    f"{_CALIBRATE}::test_groups_lie_inside_of_nodes_and_across_them",
    kind="links between nodes are never measured",
)
_bug(
    "messages_are_received_at_another_rate",
    "meshwright.plan.links",
    '"send" if kind in MESSAGES else kind',
    "kind",
    f"{_CALIBRATE}::test_a_kind_of_collective_takes_as_many_times_as_long_as_a_file_says",
    kind="one of several names of the same is forgotten",
)

# -- plans against published runs

_SLOWEST = "tests/plan/test_plan_time.py::test_many_devices_compute_as_the_slowest_of_them"
_bug(
    "the_slowest_is_the_fastest",
    "meshwright.plan.device",
    "return 1 - self.spread",
    "return 1 + self.spread",
    _SLOWEST,
    kind="a sign",
)
_bug(
    "all_compute_as_one",
    "meshwright.plan.kernels",
    "_arithmetic(operation, device) / pace)",
    "_arithmetic(operation, device))",
    _SLOWEST,
    kind="a step that does not wait for the slowest",
)
_bug(
    "one_part_is_read_of_many",
    "meshwright.plan.trace",
    "size = found.get(block.number, 0) + tensor.numel()",
    "size = tensor.numel()",
    "tests/plan/test_plan_step.py::test_parts_of_a_block_that_are_put_together_are_all_read",
    kind="what is counted by name is counted once",
)
_bug(
    "fragments_grow_the_other_way",
    "meshwright.plan.depth",
    "max(most, spare[self.check] + growth * beyond)",
    "spare[self.check] + growth * beyond",
    "tests/plan/test_plan.py::test_what_is_reserved_beyond_the_peak_grows_only_where_the_largest_say_so[spare1-9]",
    kind="what varies by chance is taken to grow",
)
_bug(
    "groups_share_one_product",
    "meshwright._compat.planning",
    "size = [offsets.shape[0], left.shape[0], right.shape[1]]",
    "size = [1, left.shape[0], right.shape[1]]",
    "tests/plan/test_plan.py::test_a_plan_is_what_real_ranks_do[fsdp2-2ranks-float32-qwen3_moe grouped]",
    kind="what an operator gives is told wrongly",
)
_SEARCH = "tests/plan/test_plan_search.py"
_bug(
    "what_is_known_beforehand_is_learned_again",
    "meshwright.plan.search.expect",
    " - self.beside[list(given)] - seen @ mean",
    " - seen @ mean",
    f"{_SEARCH}::test_expectations_are_those_of_a_gaussian_process",
    kind="a cost is counted twice",
)
_bug(
    "bubbles_are_free",
    "meshwright.plan.search.glance",
    "/ ranks / (1 - waiting)",
    "/ ranks",
    f"{_SEARCH}::test_a_pipeline_is_told_by_one_stage_its_bubbles_and_what_it_holds",
    kind="a cost is left out of a forecast",
)
_bug(
    "one_more_microbatch_is_held",
    "meshwright.plan.search.glance",
    "max(0.0, live - 1) * ",
    "max(0.0, live) * ",
    f"{_SEARCH}::test_a_pipeline_is_told_by_one_stage_its_bubbles_and_what_it_holds",
    kind="a cost is counted twice",
)
_bug(
    "ranks_wait_as_long_for_few_as_for_many",
    "meshwright.plan.search.expect",
    "return idle / (idle + count), live / ranks",
    "return waiting, live / ranks",
    f"{_SEARCH}::test_few_microbatches_tell_how_long_ranks_wait_for_many[16]",
    kind="a share of one whole is taken of another",
)
_bug(
    "the_larger_fit",
    "meshwright.plan.search.expect",
    "(room.log() - size.log())",
    "(size.log() - room.log())",
    f"{_SEARCH}::test_who_is_expected_to_hold_more_fits_less_likely",
    kind="a sign",
)
_bug(
    "what_is_set_is_searched",
    "meshwright.plan.search.candidates",
    'any(each == key or key.startswith(f"{each}.") for each in self.kept)',
    "any(each == key for each in self.kept if not each)",
    "tests/plan/test_plan_search.py::test_kept_settings_stay_and_others_are_searched",
    kind="what the user has set is not kept",
)
_bug(
    "millions_of_tokens",
    "meshwright.plan.search.recommend",
    '"M": 2**20',
    '"M": 10**6',
    "tests/plan/test_plan_search.py::test_tokens_are_counted_as_the_field_does",
    kind="a unit is another than is said",
)
_bug(
    "a_plan_of_another_objective",
    "meshwright.plan.comparison",
    "    if config.objective is not None:\n",
    "    if False:\n",
    "tests/plan/test_plan_beside.py::test_a_plan_of_the_token_loss_refuses_no_run_of_another_objective",
    kind="a run is refused for what it does not do",
)
_bug(
    "options_without_their_wish",
    "meshwright.plan.command",
    "if given is not None and value is None:",
    "if given is not None and value == '':",
    "tests/plan/test_plan.py::test_options_that_do_not_go_together_are_refused[arguments2---max-nodes belongs to --gpus]",
    kind="an option that has no effect is taken without a word",
)
_bug(
    "model_types_past_their_list",
    "meshwright._compat.model_types",
    '.partition("\\n__all__")[0]',
    "",
    "tests/contract/test_early_errors.py::test_model_types_are_read_as_transformers_has_them",
    kind="a name that is no model type is taken for one",
)
_bug(
    "types_of_the_user_forgotten",
    "meshwright._compat.model_types",
    "found = [] if loaded else _read()",
    "found = _read()",
    "tests/contract/test_early_errors.py::test_model_types_are_read_as_transformers_has_them",
    kind="what a user has registered is refused",
)
_bug(
    "a_plan_without_the_model_of_train",
    "meshwright.train.run.model_section",
    "seq_len=config.data.seq_len",
    "seq_len=1",
    "tests/contract/test_early_errors.py::test_all_commands_say_the_same_before_they_import_what_trains"
    "[model.max_position_embeddings=8-the model holds 8 positions-without3]",
    kind="what is wrong is told late",
)
_PAIRS = "tests/contract/test_compat.py::test_arithmetic_of_attention_is_that_of_pairs_that_act_on_each_other"
_bug(
    "parts_as_if_they_began",
    "meshwright._compat.arithmetic",
    "        keys_before = keys - queries\n",
    "        keys_before = 0\n",
    f"{_PAIRS}[3-7]",
    kind="a part of an attention is planned to cost less than it does",
)
_bug(
    "backward_as_forward",
    "meshwright._compat.arithmetic",
    '    if "backward" in str(operator):\n',
    "    if False:\n",
    f"{_PAIRS}[5-5]",
    kind="a backward is planned to cost less than it does",
)
_bug(
    "masked_attention_of_all_pairs",
    "meshwright._compat.arithmetic",
    "is_causal or mask is not None or not names",
    "is_causal or not names",
    "tests/plan/test_plan.py::test_ranks_of_context_parallelism_attend_together_as_one_does_alone[allgather]",
    kind="a part of an attention is planned to cost more than it does",
)
_SUMS = "plugins/pipeline/tests/test_pipeline_sums.py"
_MIXED = "{'mp_policy': {'param_dtype': 'bfloat16', 'reduce_dtype': 'float32'}}"
_bug(
    "norms_summed_in_their_own_dtype",
    "meshwright_pipeline.run.stage",
    "        self.manager.after_backward(is_last=False)\n\n        def finish",
    "\n        def finish",
    f"{_SUMS}::test_sums_over_microbatches_are_those_of_one_process"
    "[ddp-bfloat16-{'reduce_dtype': 'float32'}-InterleavedZeroBubble]",
    kind="sums over microbatches are rounded each time",
)
_bug(
    "weights_summed_in_their_own_dtype",
    "meshwright_pipeline.run.stage",
    "            self.manager.after_weights()\n",
    "            self.manager.after_backward(is_last=False)\n",
    f"{_SUMS}::test_sums_over_microbatches_are_those_of_one_process[fsdp2-float32-{_MIXED}-ZBVZeroBubble]",
    kind="sums over microbatches are rounded each time",
)
_bug(
    "sums_that_stay_narrow",
    "meshwright_fsdp2._compat",
    "            parameter.to_accumulated_grad_if_needed()\n",
    "",
    "plugins/fsdp2/tests/test_fsdp2_compat.py::test_gradients_that_wait_are_added_up_in_the_dtype_of_reductions",
    kind="sums over microbatches are rounded each time",
)
_bug(
    "late_weights_beside_sums",
    "meshwright_fsdp2.manager",
    "        if is_last or defer is not True:\n            add_up(self._sharding.modules)\n",
    "",
    f"{_SUMS}::test_a_step_of_one_microbatch[ZBVZeroBubble]",
    kind="a unit of two dtypes cannot be reduced",
)
_bug(
    "unused_parameters_beside_sums",
    "meshwright_fsdp2._compat",
    "if len(without) < len(gathered) else ()",
    "if not gathered else ()",
    "plugins/fsdp2/tests/test_fsdp2_sums.py::test_parameters_that_some_microbatches_do_not_use[True-steps]",
    kind="a unit of two dtypes cannot be reduced",
)
_bug(
    "unchecked_growth",
    "meshwright.plan.depth",
    "if not are_alike(told, checked):",
    "if False:",
    "tests/plan/test_plan.py::test_what_does_not_grow_evenly_is_not_told",
    kind="what is extrapolated is not checked",
)
_bug(
    "a_peak_elsewhere",
    "meshwright.plan.depth",
    "if made[PEAK] != max(made[PHASES].values()):",
    "if False:",
    "tests/plan/test_plan.py::test_what_does_not_grow_evenly_is_not_told",
    kind="what is extrapolated is not checked",
)
_bug(
    "steady_too_early",
    "meshwright_pipeline.schedule.rules",
    'ScheduleRule("Interleaved1F1B", _interleaved_1f1b, 2, None, steady=lambda ranks: (3 * ranks, ranks))',
    'ScheduleRule("Interleaved1F1B", _interleaved_1f1b, 2, None, steady=lambda ranks: (2 * ranks, ranks))',
    "plugins/pipeline/tests/test_schedules.py::test_further_microbatches_repeat_what_a_steady_schedule_does"
    "[Interleaved1F1B-2-3]",
    kind="what is extrapolated is not checked",
)
_bug(
    "numbers_without_their_type",
    "meshwright._compat.planning",
    "found += (type(value), value)",
    "found.append(value)",
    "tests/contract/test_compat.py::test_what_torch_has_found_out_about_an_operator_is_found_again",
    kind="an operator is planned to give what another gives",
)
_bug(
    "stages_without_plans",
    "meshwright.plan.pictures.shown",
    "sorted({*stage_ranks(ranks[0], degrees), *ranks})",
    "ranks",
    "tests/plan/test_plan_pictures.py::test_the_plans_of_all_stages_are_drawn",
    kind="a picture leaves out a part of what it is of",
)

# -- what goes away

_bug(
    "warns_at_a_line_of_ours",
    "meshwright.files.versions",
    'return package.partition("_")[0] in _OURS',
    "return package in _OURS",
    "tests/contract/test_deprecation.py::test_the_warning_names_the_users_line_through_our_modules_and_pydantic",
    kind="a warning names a line that the user cannot mend",
)
_bug(
    "an_old_name_is_silent",
    "meshwright_ddp.config",
    "        if self.use_custom_fsdp:\n            warn_deprecated(",
    "        if self.use_custom_fsdp and False:\n            warn_deprecated(",
    f"{_D}/test_ddp_config.py::test_use_custom_fsdp_is_an_old_name_and_warns",
    kind="what will go away does not say so",
)

# -- ends of processes

_bug(
    "ends_while_threads_hold_tensors",
    "meshwright.mesh.gloo_threads",
    "atexit.register(settle)",
    "settle()",
    "tests/launch/test_gloo_threads.py::test_a_process_ends_once_threads_of_gloo_have_let_go",
    kind="a process ends before what runs in it has",
)

# -- observers

_bug(
    "saves_count_for_the_step_before",
    "meshwright.train.loop.fit",
    "            self.saving = {}\n",
    "",
    "tests/train/test_observers.py::test_a_step_tells_its_parts_rates_and_memory",
    kind="what is reported is not what was done",
)
_bug(
    "a_new_run_at_each_sitting",
    "meshwright.train.run.journal",
    "return known if isinstance(known, str) and known else new_id()",
    "return new_id()",
    "tests/train/test_observers.py::test_events_and_files_of_ranks_go_on_with_a_run_that_is_resumed",
    kind="a run that goes on is told as another",
)
_bug(
    "a_tracker_ends_the_run",
    "meshwright.train.run.trackers",
    "            self._has_failed = True\n            warn(",
    "            raise\n            warn(",
    "tests/train/test_observers.py::test_a_tracker_that_fails_is_told_once_and_training_goes_on",
    kind="what only watches ends what it watches",
)
_bug(
    "an_observer_hides_the_error",
    "meshwright.train.loop.telling",
    "            _in_vain(lambda: hook.on_run_end(summary=summary))",
    "            hook.on_run_end(summary=summary)",
    "tests/train/test_observers.py::test_an_observer_that_fails_at_the_end_does_not_hide_what_has_ended_the_run",
    kind="what only watches ends what it watches",
)
_bug(
    "the_optimizer_of_an_accelerator_counts_twice",
    "meshwright.train.loop.stopwatch",
    "        self._spans = waiting\n",
    "",
    "tests/train/test_observers.py::test_parts_of_an_accelerator_are_told_as_soon_as_they_are_known",
    kind="what is reported is not what was done",
)
_bug(
    "a_device_without_runtime_is_asked",
    "meshwright.tensors.ops",
    "found is not None and found.type == device.type",
    'device.type != "cpu"',
    "tests/contract/test_devices.py::test_only_an_accelerator_is_asked_for_times_and_memory[ipu:0]",
    kind="what only watches ends what it watches",
)

# -- norms by block, and FLOPs

_NORMS = "tests/optim/test_gradient_norms.py::test_norms_by_block_are_those_of_one_process"
_FLOPS = "tests/plan/test_model_flops.py"
_bug(
    "norms_of_blocks_over_local_parts",
    "meshwright.tensors.norms",
    "            if group.size() > 1:\n                dist.all_reduce(vector, group=group)",
    "            pass",
    f"{_NORMS}[tp-sequence-tied]",
    kind="a norm over the local shards",
)
_bug(
    "norms_of_owned_stretches",
    "meshwright_ddp.optimizer",
    "return (self._shards.group,)",
    "return ()",
    f"{_NORMS}[ddp-zero1-tied]",
    kind="a norm over the local shards",
)
_bug(
    "norms_of_copies_on_stages",
    "meshwright_pipeline.state.copies",
    "if parameter not in repeated",
    "if repeated is not None",
    f"{_NORMS}[pp-single-tied]",
    kind="replicated gradients are counted once for each copy",
)
_bug(
    "scores_computed_twice",
    "meshwright.plan.model_flops",
    "found = found * 4 // 5",
    "pass",
    f"{_FLOPS}::test_attention_counts_pairs_that_act_and_no_scores_twice",
    kind="recomputation counts as what a model needs",
)
_bug(
    "blocks_are_taken_for_alike",
    "meshwright.plan.model_flops",
    "if of(second) + growth * (check - second) == of(check):",
    "if of(check):",
    f"{_FLOPS}::test_blocks_that_differ_are_not_told_by_few",
    kind="what is extrapolated is not checked",
)

# -- plugins/trackers

_TRACKERS = "plugins/trackers/tests/test_trackers.py"
_bug(
    "steps_are_shown_twice",
    "meshwright_trackers.tensorboard",
    "step=run.start + 1, session_log=started",
    "step=run.steps + 1, session_log=started",
    f"{_TRACKERS}::test_tensorboard_takes_what_is_not_finite_and_voids_what_is_done_again",
    kind="what a run that goes on does again is kept beside what it replaces",
)
_bug(
    "another_run_of_mlflow",
    "meshwright_trackers.mlflow",
    "if not found:",
    "if run.start == 0 or not found or found[0].info.status != 'RUNNING':",
    f"{_TRACKERS}::test_mlflow_goes_on_with_its_run_and_keeps_options_that_have_changed",
    kind="a run that goes on is a new one to those who watch it",
)
_bug(
    "secrets_are_told",
    "meshwright_trackers.metrics",
    'if name != "trackers"',
    "if name",
    f"{_TRACKERS}::test_parameters_are_the_run_file_with_dots_and_no_secret_of_a_tracker",
    kind="a secret of a file is shown to whoever sees the run",
)
_bug(
    "a_lost_server_is_not_told",
    "meshwright_trackers.background",
    "self._error, self._has_failed = error, True",
    "self._has_failed = True",
    f"{_TRACKERS}::test_what_is_sent_in_the_background_is_sent_in_order_and_what_fails_is_raised_once",
    kind="a failure in a thread is swallowed",
)
_bug(
    "failed_runs_are_finished",
    "meshwright_trackers.tracker",
    'self.end("failed", {})',
    'self.end("done", {})',
    f"{_TRACKERS}::test_mlflow_goes_on_with_its_run_and_keeps_options_that_have_changed",
    kind="a run that has failed looks done",
)

# -- profiles

_bug(
    "waits_compute",
    "meshwright.profile.activity",
    "without(computing, _covered(each for each in of_main if each.sends))",
    "computing",
    "tests/diagnose/test_profile.py::test_an_operator_that_waits_for_messages_computes_nothing_though_another_is_around_it",
    kind="exposed communication is told as computing",
)

_bug(
    "threads_of_gloo_compute",
    "meshwright.profile.activity",
    "[each for each in spans if each.thread == main]",
    "list(spans)",
    "tests/diagnose/test_profile.py::test_on_a_cpu_exposed_is_what_gloo_takes_while_the_main_thread_runs_no_operator",
    kind="exposed communication is told as computing",
)

_bug(
    "kernels_of_nccl_compute",
    "meshwright.profile.activity",
    "_covered(each for each in on_device if not each.is_communication)",
    "_covered(on_device)",
    "tests/diagnose/test_profile.py::test_on_a_gpu_exposed_is_what_nccl_takes_while_no_other_kernel_or_copy_runs",
    kind="exposed communication is told as computing",
)

_bug(
    "waits_that_no_thread_shows",
    "meshwright.mesh.world",
    "with marked(WAIT):",
    "if True:",
    "tests/diagnose/test_profile_runs.py::test_exposed_communication_is_sampled_on_the_first_rank_every_so_many_steps",
    kind="a wait for a late rank is not seen",
)

_bug(
    "windows_count_from_the_sitting",
    "meshwright.profile.recording",
    "step = self._start + index + 1",
    "step = index + 1",
    "tests/diagnose/test_profile_runs.py::test_a_resumed_run_profiles_what_is_left_of_its_windows",
    kind="a run that goes on counts its steps anew",
)

_bug(
    "every_rank_is_profiled",
    "meshwright.train.run.observing",
    "asked.takes(mesh.rank)",
    "True",
    "tests/diagnose/test_profile_runs.py::test_a_run_profiles_the_steps_and_the_ranks_that_were_chosen",
    kind="an option is ignored",
)

_bug(
    "windows_of_other_lengths",
    "meshwright.profile.compare",
    "getattr(table[name], attribute) / each.count",
    "getattr(table[name], attribute)",
    "tests/diagnose/test_profile.py::test_a_comparison_is_by_step_and_by_the_size_of_the_difference",
    kind="sums of windows of different lengths are compared",
)

_WATCH = "tests/watch/test_watch.py"
_bug(
    "a_spike_is_left_out_of_a_picture",
    "meshwright.watch.downsample",
    "(is_finite & (values == lowest[number]), is_finite & (values == highest[number]), ~is_finite)",
    "(is_finite & (values == lowest[number]), ~is_finite)",
    f"{_WATCH}::test_the_lowest_and_highest_of_all_are_drawn_whatever_is_left_out",
    kind="what is shown is not what was done",
)

_bug(
    "a_torn_line_is_read_twice_or_never",
    "meshwright.watch.tail",
    '        end = content.rfind(b"\\n") + 1\n',
    "        end = len(content)\n",
    f"{_WATCH}::test_each_line_is_given_once_and_a_torn_one_when_it_is_whole",
    kind="a file that somebody else is writing",
)

_bug(
    "a_rank_that_goes_back_keeps_its_old_steps",
    "meshwright.watch.ranks",
    "        if part.is_new:\n            columns.clear()\n",
    "",
    "tests/watch/test_watch.py::test_a_rank_over_its_steps_goes_on_where_its_file_does",
    kind="what is reported is not what was done",
)
_bug(
    "another_rank_gets_the_history_of_the_last",
    "meshwright.watch.ranks",
    "self._whole is None or self._whole[0] != rank",
    "self._whole is None",
    "tests/watch/test_watch.py::test_a_rank_over_its_steps_goes_on_where_its_file_does",
    kind="what is reported is not what was done",
)
_bug(
    "a_step_done_again_is_shown_twice",
    "meshwright.watch.columns",
    "            place = bisect.bisect_left(steps, step)\n",
    "            place = bisect.bisect_right(steps, step)\n",
    f"{_WATCH}::test_later_lines_replace_earlier_ones_as_for_a_run_that_goes_on",
    kind="what is shown is not what was done",
)

_bug(
    "any_name_is_this_machine",
    "meshwright.watch.server",
    "        return name in names\n",
    "        return bool(name)\n",
    f"{_WATCH}::test_another_name_for_this_machine_is_refused[evil.example]",
    kind="a check that lets all pass",
)

_bug(
    "waiting_for_a_neighbour_counts_as_computing",
    "meshwright_pipeline.run.actions",
    "        received = () if stage.is_first else self._arrived(Kind.RECV_F, action)\n        self._starts()\n",
    "        self._starts()\n        received = () if stage.is_first else self._arrived(Kind.RECV_F, action)\n",
    "tests/plan/test_timeline.py::test_ranks_of_a_pipeline_note_each_action_of_the_steps_that_are_asked_for",
    kind="what is reported is not what was done",
)

# -- guide

_bug(
    "a_run_file_is_replaced_unasked",
    "meshwright.guide.first_run.write",
    'file.open("w" if overwrite else "x"',
    'file.open("w" if file.exists() else "x"',
    "tests/cli/test_init.py::test_what_has_appeared_meanwhile_is_left_as_it_is",
    kind="a file of the user's is lost",
)
_bug(
    "copies_are_told_as_divided",
    "meshwright.guide.explain.holdings",
    "if others[axis].parameters != first.parameters)",
    "if True)",
    "tests/cli/test_explain.py::test_who_holds_what_and_what_is_sent_follow_the_layout[hsdp]",
    kind="words that are true of another layout",
)
_bug(
    "clocks_that_are_off_pass",
    "meshwright.guide.doctor.together",
    "if abs(offset) > SKEW_S + trip:",
    "if offset > SKEW_S + trip:",
    "tests/cli/test_doctor.py::test_nodes_compare_their_clocks_and_what_they_see_of_a_directory[-5.0-warning]",
    kind="what is off in one direction is not seen",
)
_bug(
    "what_is_wrong_exits_well",
    "meshwright.guide.doctor.finding",
    'if each.state == "wrong")',
    'if each.state == "failed")',
    "tests/cli/test_doctor.py::test_the_exit_code_is_that_of_what_is_wrong",
    kind="a failure that a script cannot see",
)

_bug(
    "class_of_one_room_leads_to_no_section",
    "meshwright.base.error_text",
    "known = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)",
    "known = type(error)",
    "tests/docs/test_site.py::test_an_error_of_a_class_of_one_room_leads_to_the_class_that_it_derives_from",
    kind="a message that leads nowhere",
)

_bug(
    "error_of_a_rank_does_not_say_where_to_read",
    "meshwright.launch.rank",
    "_render(error, said(error), with_traceback=show_traceback)",
    'f"error: {error}\\n"',
    "tests/launch/test_launch.py::TestOutsideAWorld::test_user_error_is_its_message_and_where_to_read_on",
    kind="a message that leads nowhere",
)

_bug(
    "utilization_of_one_device",
    "meshwright.events.step",
    "(self.seconds * self.peak_flops * self.world_size)",
    "(self.seconds * self.peak_flops)",
    "tests/train/test_observers.py::test_utilization_is_the_models_work_of_what_all_devices_could_do",
    kind="what is reported is not what was done",
)
_bug(
    "tokens_of_all_as_of_one",
    "meshwright.events.step",
    "return self.tokens_per_second / self.world_size",
    "return self.tokens_per_second",
    "tests/train/test_observers.py::test_a_step_tells_its_parts_rates_and_memory",
    kind="what is reported is not what was done",
)

# -- plan.fleet

_bug(
    "a_save_is_there_before_it_is_written",
    "meshwright.plan.fleet.simulation",
    "written = saves - ((saves > 0) & (since < rhythm.write))",
    "written = saves",
    "tests/plan/test_fleet.py::test_a_simulated_run_is_one_that_goes_step_by_step[as it is]",
    kind="what is reported is not what was done",
)
_bug(
    "copies_outlive_the_node_that_has_them",
    "meshwright.plan.fleet.simulation",
    "(second < 2 * self.lost_nodes / self.others)",
    "(second < 0 * self.lost_nodes / self.others)",
    "tests/plan/test_fleet.py::test_a_simulated_run_is_one_that_goes_step_by_step[copied on two nodes, down for long]",
    kind="a case that seldom occurs is left out",
)
_bug(
    "each_copy_of_a_state_is_saved",
    "meshwright.plan.fleet.advice",
    "hold, write = whole / world / asked.copy_bandwidth, on_disk(whole / world)",
    "hold, write = own / asked.copy_bandwidth, on_disk(own)",
    "tests/plan/test_fleet_plan.py::test_a_save_holds_up_by_a_copy_and_takes_what_the_disks_need",
    kind="a part for the whole, or the whole for a part",
)

# -- the watchdog

_WATCHDOG = "tests/launch/test_watchdog.py"
_bug(
    "one_that_moves_is_enough",
    "meshwright.launch.hang",
    "too_long = all(",
    "too_long = any(",
    f"{_WATCHDOG}::test_the_ranks_at_the_earliest_position_stand_still_or_nobody_does",
    kind="an alarm in a run that moves",
)
_bug(
    "who_waits_is_blamed",
    "meshwright.launch.hang",
    "if not reports[rank].sign.waits] or found",
    "if reports[rank].sign.waits] or found",
    f"{_WATCHDOG}::test_of_ranks_at_one_place_the_one_is_named_that_does_not_wait_or_has_begun_less",
    kind="the victim of a hang is named in the place of its cause",
)
_bug(
    "what_is_new_may_not_be_slow",
    "meshwright.mesh.progress",
    "patient = phase in PATIENT or phase not in self._known",
    "patient = phase in PATIENT",
    f"{_WATCHDOG}::test_progress_is_of_phases_and_microbatches_and_what_is_new_may_be_slow",
    kind="an alarm in a run that moves",
)
_bug(
    "who_is_stopped_is_waited_for",
    "meshwright.launch.companion",
    "silent_s = 0.0 if has_come else silent_s",
    "silent_s = 0.0 if True else silent_s",
    "tests/launch/test_companion.py::test_who_is_stopped_is_ended_when_its_patience_is_over_and_who_tells_is_not",
    kind="a process that nobody ends",
)
_bug(
    "who_is_stopped_soon_is_borne_for_long",
    "meshwright.mesh.progress",
    "if self._begun == 2:",
    "if self._begun == 0:",
    f"{_WATCHDOG}::test_a_rank_that_is_stopped_is_named_and_ended_under_torchrun[0]",
    kind="a process that nobody ends",
)
_bug(
    "a_companion_outlives_its_rank",
    "meshwright.launch.companion",
    "while os.getppid() == rank:",
    "while True:",
    "tests/launch/test_companion.py::test_a_companion_ends_with_its_rank_however_that_ends[its worker lives on and has all it "
    "had open]",
    kind="a process that nobody ends",
)
_bug(
    "a_pause_of_all_is_silence",
    "meshwright.launch.companion",
    "min(elapsed_s, 2 * interval_s)",
    "elapsed_s",
    "tests/launch/test_companion.py::test_what_stops_both_is_borne_for_as_long_as_it_takes",
    kind="an alarm in a run that moves",
)

# -- runs that break

_BAD, _VERIFY = "tests/train/test_bad_steps.py", "tests/checkpoint/test_verify.py"
_bug(
    "only_the_first_element_is_looked_at",
    "meshwright.tensors.ops",
    "(odd[: part.numel()] + 2 * start)",
    "(odd[: part.numel()] + 2 * start) * (odd[: part.numel()] == 1)",
    f"{_VERIFY}::test_every_bit_counts[dtype1]",
    kind="a check that cannot fail",
)
_bug(
    "a_run_that_fails_at_once_keeps_its_ranks",
    "meshwright.train.run.start",
    "0 if has_trained else min(self._fewer + 1, len(self._counts) - 1)",
    "0 if has_trained else self._fewer",
    "tests/launch/test_restarts.py::test_ranks_are_fewer_after_a_failure_at_once_and_as_many_as_may_be_after_steps",
    kind="a failure that comes again",
)
_bug(
    "a_save_is_begun_though_the_time_is_up",
    "meshwright.train.loop.fit",
    "return bool(self.world.reduce_ints([seconds > signals.left_s])[0])",
    "return False",
    "tests/train/test_stopping.py::test_a_save_that_would_outlast_the_time_that_is_left_is_not_begun_on_any_rank",
    kind="a signal that is not heeded",
)
_bug(
    "left_out_batches_come_again",
    "meshwright.train.loop.bad_steps",
    "self.left_out += bad.step - to",
    "self.left_out += bad.step - to - 1",
    f"{_BAD}::test_every_stack_goes_back_and_leaves_out_the_batches_since_then[pp2 fsdp2]",
    kind="off by one in the order of the data",
)
_bug(
    "rate_stays_behind_after_a_step_that_was_left_out",
    "meshwright.train.loop.step",
    "    if scheduler is not None:\n        scheduler.step()\n    return scheduled",
    "    if scheduler is not None and bad is None:\n        scheduler.step()\n    return scheduled",
    f"{_BAD}::test_every_stack_leaves_out_a_step_that_is_not_a_number[megatron_fsdp]",
    kind="a schedule that is not where the run is",
)
_bug(
    "going_back_leaves_the_schedule_where_it_was",
    "meshwright.train.loop.rewinding",
    "self._loop.scheduler.load_state_dict(copy.deepcopy(schedule))",
    "pass",
    f"{_BAD}::test_every_stack_goes_back_and_leaves_out_the_batches_since_then[pp2 fsdp2]",
    kind="a schedule that is not where the run is",
)
_bug(
    "what_was_left_out_is_forgotten_in_a_resume",
    "meshwright.train.loop.bad_steps",
    'self.left_out, self.count = int(known.get("left_out", 0)), int(known.get("count", 0))',
    'self.left_out, self.count = 0, int(known.get("count", 0))',
    f"{_BAD}::test_a_course_goes_on_as_it_would_have_after_it_was_stopped[4-function]",
    kind="a resumed run is another run",
)
_bug(
    "bits_are_looked_at_after_the_save",
    "meshwright.train.loop.fit",
    "        if self.verifier is not None:\n            self.verifier.verify(result.step)\n        if loop.on",
    "        if loop.on",
    f"{_VERIFY}::test_no_corrupted_state_is_saved",
    kind="a corrupted state is saved",
)
_bug(
    "what_is_copied_is_not_looked_at",
    "meshwright.train.loop.fit",
    "            if self.verifier is not None:\n                self.verifier.verify(step)\n            return self.extra(step)",
    "            return self.extra(step)",
    "tests/replicate/test_memory_keeper.py::test_what_a_bit_has_changed_is_not_copied[every=1]",
    kind="a corrupted state is saved",
)
_WORLDS = "tests/launch/test_same_world.py"
_bug(
    "who_begins_anew_meets_the_dead",
    "meshwright.launch.rank",
    "    if not started_by_torchrun():\n        return store",
    "    if store is not None:\n        return store",
    f"{_WORLDS}::test_who_begins_anew_after_a_hang_is_not_told_of_it_again",
    kind="what another run or world has left is taken for one's own",
)
_bug(
    "worlds_of_one_process_share_their_keys",
    "meshwright.launch.store",
    "f\"world/{store.add(f'worlds/{size}/{rank}', 1)}/{size}\"",
    '"world"',
    "tests/contract/test_mesh.py::test_worlds_of_one_process_meet_in_turn_and_each_opens_once_all_have_connected[store]",
    kind="what another run or world has left is taken for one's own",
)
_bug(
    "a_world_is_open_before_all_have_connected",
    "meshwright.launch.store",
    '    store.wait(["all_connected"])',
    "    return",
    "tests/contract/test_mesh.py::test_worlds_of_one_process_meet_in_turn_and_each_opens_once_all_have_connected[store]",
    kind="a rank leaves while others need it",
)
_bug(
    "a_rank_that_asks_again_is_not_answered",
    "meshwright.launch.store",
    "                if answered.get(rank) != word:",
    "                if rank not in answered:",
    f"{_WORLDS}::test_who_died_while_it_asked_holds_up_nobody",
    kind="what another run or world has left is taken for one's own",
)
_bug(
    "a_store_that_has_gone_is_torch_s_error",
    "meshwright.launch.store",
    "    except RuntimeError as error:",
    "    except ZeroDivisionError as error:",
    f"{_WORLDS}::test_a_store_that_has_gone_is_an_error_of_ours",
    kind="a traceback from the depths of a library",
)
_bug(
    "tasks_that_nobody_waits_for_are_told",
    "meshwright.checkpoint.remote",
    '    if not isinstance(context.get("exception"), OSError):',
    "    if loop is not None:",
    "tests/checkpoint/test_remote_checkpoints.py::"
    "test_what_a_broken_connection_leaves_behind_is_no_traceback_and_what_else_fails_is",
    kind="a traceback from the depths of a library",
)
_bug(
    "a_watchdog_changes_no_plan",
    "meshwright.plan.fleet.advice",
    "config.watchdog_s or ASSUMED_DETECTION_S",
    "ASSUMED_DETECTION_S",
    "tests/plan/test_fleet_plan.py::test_a_failure_is_noticed_as_soon_as_the_watchdog_says[asked1-more1-120]",
    kind="an option that is read and does nothing",
)
_bug(
    "own_copies_are_sent_at_any_rate",
    "meshwright.plan.fleet.advice",
    "send_s = max(send_s, found.rank_bytes / asked.bytes_per_s)",
    "pass",
    "tests/plan/test_fleet_plan.py::test_a_run_that_copies_is_taken_as_it_copies",
    kind="an option that is read and does nothing",
)
_bug(
    "ranks_outlive_their_agent",
    "meshwright.launch.rank",
    "        end_with_launcher()",
    "        pass",
    f"{_WORLDS}::test_ranks_end_with_an_agent_that_is_killed",
    kind="a process that nobody ends",
)
_bug(
    "wrong_input_is_begun_anew",
    "meshwright.train.run.start",
    "if code != FAILED or not limit:",
    "if code == 0 or not limit:",
    "tests/launch/test_restarts.py::test_a_run_is_begun_anew_until_it_has_been_so_often",
    kind="a failure that comes again",
)

# -- copies in memory

_KEEPER = "tests/replicate/test_memory_keeper.py"
_bug(
    "a_step_is_let_go_before_the_next_is_sealed",
    "meshwright.memory.keeper",
    "self._steps[step] = kept\n",
    "self._steps = {step: kept}\n",
    f"{_KEEPER}::test_the_last_sealed_step_is_kept_and_the_one_that_is_written",
    kind="what is needed if the next thing fails is given up before it is done",
)
_bug(
    "half_a_step_is_a_step",
    "meshwright.memory.place",
    "if not all(holding.values()):",
    "if not any(holding.values()):",
    f"{_KEEPER}::test_a_step_is_whole_where_some_keeper_has_each_file[[{{'tensors-00000.bin': 10}}, {{}}]-[]]",
    kind="what is incomplete is taken for whole",
)
_bug(
    "anybody_is_let_in",
    "meshwright.memory.wire",
    '    ):\n        send(connection, {"error": "the token is another"})',
    '    ) and not answer:\n        send(connection, {"error": "the token is another"})',
    f"{_KEEPER}::test_who_has_not_the_token_is_refused[another]",
    kind="a check of who asks that passes all",
)
_bug(
    "each_rank_reads_the_copy_that_is_nearest",
    "meshwright.memory.place",
    "first = {name: near[name] if near.get(name) in nodes else nodes[0] for name, nodes in holding.items()}",
    "first = {name: keepers.here if keepers.here in nodes else nodes[0] for name, nodes in holding.items()}",
    f"{_KEEPER}::test_all_ranks_read_a_file_from_the_same_keeper",
    kind="one thing is verified, and another one used",
)
_bug(
    "copies_have_a_name",
    "meshwright.memory.room",
    'os.memfd_create("meshwright-copy", os.MFD_CLOEXEC)',
    'os.open(f"/dev/shm/meshwright-copy-{os.getpid()}-{os.urandom(4).hex()}", os.O_CREAT | os.O_RDWR)',
    "tests/replicate/test_memory_copies.py::test_ranks_that_are_killed_go_on_from_the_step_before[fsdp2-1]",
    kind="memory that outlives those who use it",
)

# -- runs that went back, and places that others have

_REPLAY = "tests/diagnose/test_replay.py"
_bug(
    "what_was_left_out_is_drawn_again",
    "meshwright.replay.rank",
    "bad_steps.left_out += sum(each.batches for each in order.went_back if each.to == step)",
    "bad_steps.left_out += sum(each.batches for each in order.went_back if each.to == step and each is order.went_back[0])",
    f"{_REPLAY}::test_steps_behind_one_that_has_taken_the_run_back_come_to_the_same",
    kind="a history of which only the first turn is followed",
)
_bug(
    "what_an_earlier_sitting_did_in_vain_counts",
    "meshwright.replay.record",
    "left = [each for each in left if each[0] < start]",
    "left = list(left)",
    f"{_REPLAY}::test_where_the_run_went_back_is_read_in_the_order_of_its_sittings",
    kind="what was undone is taken for done",
)
_bug(
    "a_run_begins_amid_the_checkpoints_of_another",
    "meshwright.train.run.fate",
    "if is_elsewhere(config) and (there := all_in(saved_by(config))):",
    "if is_elsewhere(config) and held and (there := all_in(saved_by(config))):",
    "tests/checkpoint/test_remote_checkpoints.py::test_what_another_run_has_saved_is_neither_gone_on_from_nor_replaced_unasked",
    kind="what is there is overwritten unasked",
)
_bug(
    "checkpoints_of_others_are_replaced",
    "meshwright.train.run.fate",
    "isinstance(whose, str) and Path(whose).resolve() != Path(config.output_dir).resolve()",
    "whose is None",
    "tests/checkpoint/test_remote_checkpoints.py::test_what_another_run_has_saved_is_neither_gone_on_from_nor_replaced_unasked",
    kind="who may remove is not asked whose it is",
)
_bug(
    "each_node_has_a_key_of_its_own",
    "meshwright.train.run.run_directory",
    "number = 0 if key is None else key.fingerprint",
    "number = 0 if key is None else 1",
    "tests/checkpoint/test_checkpoint_verify.py::test_ranks_with_different_keys_are_refused_on_all[files2-holds another key on some nodes than on others. Give all of them the same file]",
    kind="ranks that differ are not asked whether they do",
)
_bug(
    "survivors_wait_for_the_dead",
    "meshwright.launch.rank",
    "is_lost = started_elsewhere() and not failure.timed_out",
    "is_lost = started_elsewhere() and failure.timed_out",
    "tests/launch/test_same_world.py::test_a_rank_whose_peer_was_killed_on_another_node_waits_for_no_word_of_it",
    kind="a wait for what cannot come",
)
_bug(
    "who_is_cut_off_waits",
    "meshwright.launch.environment",
    'return "launcher" if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE") else None',
    "return None",
    "tests/launch/test_same_world.py::test_a_node_that_is_cut_off_from_the_store_ends_by_itself",
    kind="a test whose nodes share what real ones do not",
)

# -- files of others, neighbours, and the network

_S = "tests/security"


def _security(name: str, module: str, before: str, after: str, test: str, kind: str) -> None:
    _bug(name, f"meshwright.{module}", before, after, f"{_S}/{test}", kind=kind)


_security(
    "an_object_of_any_class_of_torch",
    "files.class_paths",
    "and not issubclass(found, base):",
    "and False:",
    "test_class_paths.py::test_no_option_makes_an_object_of_what_it_is_not_for[objective-torch.nn.Linear]",
    "an object is made before anyone asks whether it may be",
)
_security(
    "what_a_module_has_imported_is_its_own",
    "files.class_paths",
    "    if not is_users(home) and not _is_built_in(home):\n",
    "    if False:\n",
    "test_class_paths.py::test_an_allowed_module_does_not_lend_what_it_has_imported",
    "a list of allowed modules lets in what they have imported",
)
_security(
    "scripts_beside_models",
    "files.class_paths",
    'return module is not None and (module != "transformers.models" or _MODELS.fullmatch(name) is not None)',
    "return module is not None",
    "test_class_paths.py::test_nothing_is_imported_from_modules_that_are_not_on_the_list",
    "importing a module runs it",
)
_security(
    "kernels_of_the_hub_in_a_run_file",
    "model.configuration",
    """    _check_names_no_kernels(fields, where, "name an implementation of transformers, such as 'sdpa'")\n""",
    "",
    "test_class_paths.py::test_kernels_of_the_hub_are_refused_in_a_run_file",
    "one door is watched, and another one leads to the same place",
)
_security(
    "chains_of_urls",
    "checkpoint.remote",
    '    if "::" in url:\n',
    "    if False:\n",
    "test_urls.py::test_a_name_that_a_server_lists_makes_no_chain[x::reference://y]",
    "a URL that a file names reads another file, which is run",
)
_security(
    "any_kind_of_url",
    "checkpoint.remote",
    "    if protocol not in PROTOCOLS:\n",
    "    if False:\n",
    "test_urls.py::test_other_kinds_of_urls_are_refused[reference://]",
    "a URL that a file names reads another file, which is run",
)
_security(
    "a_store_on_all_interfaces",
    "launch.store",
    "        listener.listen(_BACKLOG)\n",
    "        return None\n",
    "test_sockets.py::test_between_machines_a_store_waits_where_the_ranks_are_told",
    "a server listens on all interfaces",
)
_security(
    "an_agent_on_all_interfaces",
    "launch.local",
    "        rdzv_backend=ONE_MACHINE,\n        local_addr=LOOPBACK,\n",
    '        rdzv_backend="c10d",\n        rdzv_endpoint="localhost:0",\n        local_addr="localhost",\n',
    "test_sockets.py::test_a_run_waits_on_loopback_alone",
    "a server listens on all interfaces",
)
_security(
    "a_fork_server_imports_from_where_the_user_stands",
    "launch.safe_path",
    '    os.environ[VARIABLE] = "1"\n',
    "    pass\n",
    "test_import_path.py::test_a_run_that_python_starts",
    "a process that is started imports from the current directory",
)
_security(
    "strangers_send_as_much_as_friends",
    "memory.wire",
    "        if length > longest:\n",
    "        if length > _LONGEST:\n",
    "test_keeper.py::test_a_stranger_makes_a_keeper_hold_a_few_kilobytes",
    "what is not known yet is given room",
)
_security(
    "strangers_take_their_time",
    "memory.wire",
    '        if left_s <= 0:\n            raise TimeoutError("no proof in time")\n        connection.settimeout(left_s)\n',
    "        connection.settimeout(PATIENCE_S)\n",
    "test_keeper.py::test_silent_strangers_are_few_and_leave_soon_and_who_has_the_token_comes_through",
    "what is not known yet is given time",
)
_security(
    "a_directory_of_others",
    "memory.socket_file",
    "return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077",
    "return True",
    "test_keeper.py::test_a_directory_that_another_user_has_made_is_refused[open]",
    "a name in a place of all users is taken by another one first",
)
_security(
    "lines_through_a_link",
    "files.writing",
    "os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC",
    "os.O_CREAT | os.O_CLOEXEC",
    "test_links.py::test_files_that_grow_are_not_opened_through_links",
    "a file is written through a link",
)
_security(
    "links_in_a_directory_of_a_run",
    "train.output",
    "        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):\n",
    "        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):\n",
    "test_links.py::test_a_file_of_a_run_that_is_a_link_is_refused_and_what_it_points_to_stays[metrics.jsonl]",
    "a file is written through a link",
)
_security(
    "pieces_that_overlap",
    "checkpoint.index",
    "if elements.size > 1 and not _covers(",
    "if False and not _covers(",
    "test_checkpoints.py::test_pieces_have_each_element_once_or_are_refused[2]",
    "a sum is right, and what it is the sum of is not",
)
_security(
    "a_line_of_a_script_ends_in_a_name",
    "clusters.job",
    '("Cc", "Cs", "Zl", "Zp")',
    '("Zl", "Zp")',
    "test_generated_files.py::test_control_characters_are_refused[slurm-'\\\\n']",
    "a value in a generated file becomes a command",
)
_security(
    "kubernetes_replaces_values",
    "clusters.kubernetes",
    """return text.replace("$", "$$")""",
    "return text",
    "test_generated_files.py::test_kubernetes[0-JobSet]",
    "a value in a generated file becomes another one",
)
_security(
    "secrets_by_their_looks_alone",
    "train.hidden_values",
    "(_NAME.search(name) is not None or _VALUE.search(value) is not None)",
    "_VALUE.search(value) is not None",
    "test_secrets.py::test_what_a_run_writes_of_itself_has_no_secret_and_is_read_again",
    "a secret is written where others read",
)
_security(
    "files_with_secrets_for_all",
    "clusters.files",
    "mode=0o600 if job.has_secrets else 0o666",
    "mode=0o666",
    "test_secrets.py::test_files_of_a_job_that_hold_secrets_are_their_owners[slurm]",
    "a secret is written where others read",
)
_security(
    "a_table_steers_the_terminal",
    "files.terminal",
    "    made.push_render_hook(Escaping())\n",
    "",
    "test_terminal.py::test_a_console_writes_text_in_all_that_it_shows[0-False]",
    "text of a file steers the terminal",
)
_security(
    "text_of_a_file_is_markup",
    "files.terminal",
    "return escape(printable(str(text)))",
    "return printable(str(text))",
    "test_terminal.py::test_a_console_writes_text_in_all_that_it_shows[11-False]",
    "text of a file is read as markup, and wrong markup is an error",
)
_security(
    "links_are_followed_in_a_circle",
    "checkpoint.places",
    "os.walk(self.path, onerror=_raise)",
    "os.walk(self.path, onerror=_raise, followlinks=True)",
    "test_checkpoints.py::test_links_that_lead_in_a_circle_hang_nobody",
    "links that lead in a circle are followed",
)
_security(
    "anybody_sees_the_page",
    "watch.server",
    "elif self._is_right(request.cookies.get(self._cookie)):",
    "elif True:",
    "test_watch_files.py::test_without_the_token_nothing_is_answered[None-/]",
    "a page on loopback is taken for one that only its user sees",
)
_security(
    "a_run_hides_the_others",
    "watch.answers",
    "                except Exception as error:\n",
    "                except KeyError as error:\n",
    "test_watch_files.py::test_a_run_of_which_nobody_has_thought_leaves_the_others",
    "what is wrong with one is told of all",
)
_security(
    "compressed_data_fill_the_memory",
    "data.reading.opening",
    "        if self._count > FREE and self._count > MOST_TIMES * self._file.tell():\n",
    "        if False:\n",
    "test_compressed.py::test_a_small_file_that_becomes_a_large_one_is_refused[corpus.txt-gz]",
    "what is small in a file is large in memory",
)
_security(
    "who_has_the_number_is_killed",
    "launch.process_identity",
    "        if identity and identity_of(pid) != identity:\n",
    "        if False:\n",
    "test_processes.py::test_the_reaper_spares_who_has_the_number_of_a_dead_rank",
    "a process is known by its number alone",
)
_security(
    "a_swapped_file_is_read",
    "checkpoint.signed_reading",
    "    if place.access.key is None or not stored.chunks:\n",
    "    if True:\n",
    "test_checkpoints.py::test_a_file_that_is_exchanged_after_it_was_verified_is_not_loaded[tensors-00000.bin]",
    "one thing is verified, and another one used",
)
_security(
    "an_older_checkpoint_for_a_newer_one",
    "checkpoint.manifest",
    "    if named and int(named[1]) != manifest.step:\n",
    "    if False:\n",
    "test_checkpoints.py::test_an_older_checkpoint_in_the_place_of_a_newer_one_is_refused[None]",
    "what is genuine is taken for what it is not",
)
_security(
    "overwriting_what_no_run_has_made",
    "train.listing",
    "    if others:\n",
    "    if False:\n",
    "test_overwrite.py::test_what_no_run_has_made_is_not_removed[None-model]",
    "a name is taken for an owner",
)
_security(
    "a_full_disk_behind_the_output_is_a_traceback",
    "cli.main",
    "        if error.filename is not None or error.errno not in _OUTPUT_FAILS:\n            raise\n",
    "        raise\n",
    "test_terminal.py::test_output_that_fails_is_one_line_and_exit_code_1[strategies]",
    "what cannot be written ends in a traceback",
)
_security(
    "a_directory_that_is_gone_is_a_traceback",
    "cli.main",
    "            _check_place()\n",
    "",
    "test_terminal.py::test_a_directory_that_was_removed_is_told",
    "what cannot be read ends in a traceback",
)
_bug(
    "gathered_parameters_are_let_go_each_microbatch",
    "meshwright_fsdp2.manager",
    "root.set_reshard_after_backward(is_last)",
    "root.set_reshard_after_backward(True)",
    f"{_COUNTS}::test_parameters_that_stay_gathered_are_cast_once_a_step",
    kind="an option saves memory or messages in one place, and pays for them in another",
)
_security(
    "what_a_run_remembers_is_of_any_type",
    "checkpoint.manifest",
    "    check_extra(manifest.extra)\n",
    "",
    "test_checkpoints.py::test_what_a_run_remembers_is_taken_or_the_checkpoint_is_refused",
    "values of a file are used before anyone asks for their types",
)
_bug(
    "options_by_position_are_dropped",
    "meshwright.base.validation",
    "    return {**given, **values}\n",
    "    return {**values}\n",
    "tests/step/test_call_forms.py::test_configs_take_their_options_by_position_in_the_references_order[DDPConfig-DDPConfig]",
    kind="arguments of another form are taken, and not used",
)
_bug(
    "a_size_beside_a_device_mesh_is_not_compared",
    "meshwright.train.from_pretrained",
    "            if size not in (None, known[name]):\n",
    "            if size is not None and size < 0:\n",
    "tests/step/test_call_forms.py::test_arguments_that_contradict_a_device_mesh_are_refused_on_all_ranks[size-MeshError]",
    kind="of two values that contradict each other one is dropped",
)
_bug(
    "the_install_line_installs_core_alone",
    "meshwright.strategy.registry",
    "-e '.[{INSTALLABLE[name]}]'\"\n",
    '-e ."\n',
    "tests/contract/test_packages.py::test_a_strategy_has_an_install_line_and_an_entry_point_of_its_name[fsdp2]",
    kind="a remedy that changes nothing",
)
_bug(
    "brackets_of_a_directory_are_a_pattern",
    "meshwright.data.reading.sources",
    "    return os.path.join(glob.escape(place), *parts)\n",
    "    return os.path.join(place, *parts)\n",
    "tests/data/test_data.py::test_what_exists_by_its_name_is_no_pattern[file]",
    kind="a name is taken for a pattern",
)
_bug(
    "a_parameter_without_elements_is_trained",
    "meshwright.model.size",
    "        if parameter.requires_grad and parameter.numel() == 0:\n",
    "        if parameter.requires_grad and parameter.numel() < 0:\n",
    "tests/tensors/test_empty_parameters.py::test_a_run_file_is_refused_before_ranks_start",
    kind="an input that nobody has is refused by a library, in its own words",
)
_bug(
    "a_panic_of_the_tokenizer_is_a_traceback",
    "meshwright.data.tokenizer",
    'if not isinstance(error, Exception) and type(error).__name__ != "PanicException":',
    "if not isinstance(error, Exception):",
    "tests/data/test_data.py::test_broken_tokenizer_file_is_a_data_error[content1]",
    kind="a library ends in an error that is no Exception",
)
_security(
    "a_tokenizer_of_any_class",
    "data.tokenizer",
    "    _check_classes(path)\n",
    "",
    "test_data_sources.py::test_a_tokenizer_is_of_a_tokenizers_class[AutoProcessor-tokenizer_config.json]",
    "an object is made before anyone asks whether it may be",
)
_security(
    "transformers_asks_whether_to_run_code",
    "data.tokenizer",
    "    never_ask()\n",
    "",
    "test_data_sources.py::test_transformers_never_asks_whether_to_run_code",
    "a library asks a question that somebody answers with yes",
)
_security(
    "a_readme_names_files_of_others",
    "_compat.datasets",
    "if not _is_own(pattern, str(base_path), directory):",
    "if False:",
    "test_data_sources.py::test_a_directory_of_a_readme_is_within_the_dataset",
    "a library opens what a file names",
)
_security(
    "a_reader_of_the_library_is_a_dataset",
    "data.reading.hub",
    "if directory is None and is_reader(datasets, str(config.dataset)):",
    "if False:",
    "test_data_sources.py::test_a_reader_of_the_library_is_no_dataset[text]",
    "a library opens what a file names",
)
_security(
    "links_of_trackers_are_followed",
    "train.output",
    "for path in (*own, *below):",
    "for path in below:",
    "test_links.py::test_a_file_of_a_run_that_is_a_link_is_refused_and_what_it_points_to_stays[mlflow.db]",
    "a list of names stands for all that is written",
)
_security(
    "an_append_waits_at_a_pipe",
    "files.writing",
    "| os.O_NONBLOCK",
    "",
    "test_links.py::test_a_pipe_in_the_directory_of_a_run_is_refused[mlflow.db]",
    "a command waits at a pipe for ever",
)
_security(
    "a_read_waits_at_a_pipe",
    "files.parsing",
    "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC",
    "os.O_RDONLY | os.O_CLOEXEC",
    "test_endless.py::test_a_pipe_is_not_waited_for[key]",
    "a command waits at a pipe for ever",
)
_security(
    "work_has_no_time_limit",
    "files.time_limit",
    "signal.setitimer(signal.ITIMER_REAL, seconds)",
    "pass",
    "test_endless.py::test_work_is_ended_after_a_time_and_others_are_not",
    "text of others decides how long a command takes",
)
_security(
    "patterns_of_adapters_have_no_limit",
    "_compat.peft",
    "        _check_patterns(model, config)\n",
    "",
    "test_endless.py::test_a_pattern_that_does_not_end_is_refused[options0]",
    "text of others decides how long a command takes",
)
_security(
    "libraries_log_escapes",
    "files.terminal",
    "    logging.setLogRecordFactory(_Record)\n",
    "",
    "test_terminal.py::test_what_libraries_log_and_warn_of_is_escaped",
    "text of files steers the terminal by another way",
)
_security(
    "secrets_in_lines_are_written",
    "train.hidden_values",
    "return without_assigned(value) if isinstance(value, str) else value",
    "return value",
    "test_secrets.py::test_secrets_in_lines_of_shell_are_hidden",
    "a secret is known by its place alone",
)
