"""What `make test` takes a sample of, to end within twenty minutes on two cores: the other cases are `further`.

`make further` runs those; continuous integration does after each `make test`.
"""

import pytest

# Of a test's cases in their order every nth, the first included. Where they are a grid, n has no factor of its sides
# that would leave out a side. 0: none.
EVERY = {
    "benchmarks/test_gpu.py::test_ranks_give_the_numbers_of_one_process": 0,
    "cli/test_application.py::test_what_is_closed_from_the_start_takes_what_is_said": 5,
    "cli/test_calibrate.py::test_what_is_measured_is_printed_and_written": 0,
    "cli/test_plan.py::test_a_plan_is_trained_and_compared_with_what_is_measured": 0,
    "cli/test_train.py::test_two_ranks_then_resume_under_torchrun": 0,
    "cli/test_verify.py::test_torchrun_and_a_wrong_module": 0,
    "cuda_like/test_communication.py::test_eight_ranks_of_a_network_keep_nccls_rules": 3,
    "docs/test_notebook.py::test_the_notebook_runs_and_shows_what_it_shows": 0,
    "docs/test_site.py::test_commands_are_understood": 3,
    "doctor/probes/test_training.py::test_a_planted_fault_is_named": 3,
    "doctor/probes/test_training.py::test_a_sound_loop_gives_nothing": 3,
    "doctor/rehearsal/test_recipe_steps.py::test_a_planted_recipe_is_named_by_its_small_form": 3,
    "examples/test_bev_segmentation.py::test_training_learns_and_draws": 0,
    "examples/test_detection.py::test_training_learns_and_draws": 0,
    "examples/test_loops.py::test_hugging_faces_trainer_trains_and_evaluates": 0,
    "examples/test_medical_unet3d.py::test_split_over_ranks": 0,
    "examples/test_seven_cameras.py::test_narrow_it_is_exact_and_trains": 0,
    "examples/test_sparse_view_ct.py::test_split_over_ranks": 2,
    "examples/test_sparse_view_ct.py::test_training_learns_and_draws": 0,
    "horovod/launcher/test_jobs.py::test_a_killed_rank_is_started_again_and_the_numbers_stay": 0,
    "horovod/launcher/test_jobs.py::test_a_rank_that_only_lost_another_is_not_the_cause": 2,
    "horovod/launcher/test_jobs.py::test_the_same_script_under_torchrun": 0,
    "launching/test_on_slurm.py::test_two_nodes_train_to_the_bits_of_one_machine": 0,
    "model/compiled/test_blocks.py::test_a_compiled_block_gives_one_process_numbers_or_says_why_not": 3,
    "model/sharding/test_fsdp.py::test_every_gradient_is_that_of_one_process": 2,
    "model/sharding/test_taken.py::test_what_is_taken_of_a_unit_is_whole": 3,
    "model/test_parallelize.py::test_methods_and_attributes_are_those_of_the_model": 2,
    "model/test_unused.py::test_gradients_and_updates_are_one_process_s": 3,
    "model/test_unused.py::test_with_every_technique": 2,
    "models/test_architectures.py::test_exact_and_nothing_is_gathered": 3,
    "models/test_models.py::test_a_split_model_gives_the_numbers_of_one_process": 7,
    "observation/leaks/test_observer.py::test_a_leak_is_named": 6,
    "observation/leaks/test_observer.py::test_an_honest_program_gives_no_warning": 6,
    "planning/test_search.py::test_the_search_finds_what_looking_at_everything_finds": 3,
    "processes/test_nodes.py::test_an_error_of_the_job_is_final_on_all_machines": 0,
    "simulation/compiled/test_blocks.py::test_fused_ops_read_and_keep_less_on_a_gpu": 2,
    "simulation/fake/test_full_masks.py::test_the_bytes_are_an_upper_bound_that_a_full_mask_meets": 2,
    "simulation/memory/test_scratch.py::test_blocks_that_channels_do_not_fill_take_what_torch_takes": 2,
    "simulation/memory/test_scratch.py::test_windows_of_maps_that_onednn_does_not_take_lie_side_by_side": 5,
    "simulation/memory/test_scratch.py::test_windows_of_small_volumes_lie_side_by_side": 3,
    "spatial/rules/test_attention.py::test_as_in_one_process": 4,
    "spatial/rules/test_extremes.py::test_infinities_nan_ties_and_zeros_go_through_as_in_torch": 2,
    "spatial/rules/test_flexible_attention.py::test_as_in_one_process": 0,
    "spatial/rules/test_linear_algebra.py::test_as_in_one_process": 2,
    "spatial/rules/test_loss.py::test_losses_take_every_reduction_as_torch_does": 2,
    "spatial/rules/test_masks.py::test_as_in_one_process": 5,
    "spatial/rules/test_moments.py::test_infinities_nan_ties_and_zeros_go_through_as_in_torch": 2,
    "spatial/rules/test_normalization.py::test_corners": 3,
    "spatial/rules/test_order.py::test_infinities_nan_ties_and_zeros_go_through_as_in_torch": 2,
    "spatial/rules/test_pooling.py::test_corners": 3,
    "spatial/rules/test_quantiles.py::test_infinities_nan_ties_and_zeros_go_through_as_in_torch": 2,
    "spatial/rules/test_reduction.py::test_infinities_nan_ties_and_zeros_go_through_as_in_torch": 2,
    "spatial/rules/test_resampling.py::test_corners": 3,
    "spatial/rules/test_scan.py::test_infinities_nan_ties_and_zeros_go_through_as_in_torch": 2,
    "spatial/rules/test_transformers.py::test_as_in_one_process": 3,
    "spatial/rules/test_transposed_convolution.py::test_corners": 3,
    "spatial/test_autocast.py::test_dtypes_are_those_of_one_process": 3,
    "spatial/test_depth.py::test_as_in_one_process": 2,
    "spatial/test_gradients.py::test_what_is_seen_is_one_process_s": 3,
    "spatial/test_merged_dims.py::test_places_in_merged_dims": 2,
    "spatial/test_module_hooks.py::test_hooks_get_and_give_one_process_s_gradients": 2,
    "spatial/test_views.py::test_a_write_reaches_who_shares_the_memory": 5,
    "techniques/stages/test_through.py::test_the_plain_loop_s_numbers": 2,
    "techniques/test_optimizers.py::test_the_named_optimizer_is_torchs_with_the_recipes_options": 5,
    "techniques/test_recompute.py::test_models_on_two_by_two_ranks": 4,
    "techniques/test_recompute.py::test_runs_of_layers_are_computed_again_to_the_last_bit": 2,
    "techniques/test_recompute.py::test_the_same_to_the_last_bit_on_ranks": 2,
    "techniques/unrolling/test_unroll.py::test_split_over_ranks": 3,
    "training/faults/test_out_of_memory.py::test_a_process_alone_takes_the_step_again": 2,
    "training/faults/test_out_of_memory.py::test_an_evaluation_that_does_not_fit_ends_the_run_with_its_state_kept": 0,
    "training/faults/test_out_of_memory.py::test_several_ranks_run_out_at_once": 0,
    "training/loading/test_loader.py::test_resume_in_the_middle": 2,
    "training/loading/test_stream_order.py::test_a_run_goes_on_where_it_stood_on_another_mesh": 2,
    "training/loading/test_stream_order.py::test_training_on_a_stream_is_that_of_one_process_also_when_it_goes_on": 2,
    "training/test_combinations.py::test_five_steps_are_those_of_one_process": 7,
    "training/test_compiled.py::test_five_steps_are_those_of_one_process": 2,
    "training/test_compiled_memory.py::test_what_is_offloaded_is_let_go": 0,
    "training/test_compiled_networks.py::test_five_steps_of_a_network_are_those_of_one_process": 0,
    "training/test_resume.py::test_ten_steps_are_five_and_five_to_the_last_bit": 3,
    "verification/test_verify.py::test_a_step_that_fails_in_one_process": 3,
    "whole/test_fuzz.py::test_random_programs": 2,
}


def mark_what_is_left_out(items: list[pytest.Item]) -> None:
    """Mark the cases between every nth as `further`; a case that is asked for by itself is the first."""
    seen = dict.fromkeys(EVERY, 0)
    for item in items:
        test = item.nodeid.partition("[")[0].removeprefix("tests/")
        if test in EVERY and item.get_closest_marker("slow") is None:
            if EVERY[test] == 0 or seen[test] % EVERY[test]:
                item.add_marker("further")
            seen[test] += 1
