"""Variants of tests that `make chaos` runs and `make test` leaves out, to stay within its time.

Each pattern is searched for in the name of a test. Of nearly all, siblings stay in `make test`;
of the contract of `coded` and `elastic`, what is exact and that uneven parts finish; of those of `ddp` and
`single`, that and how they end.
"""

from __future__ import annotations

import re

_PATTERNS = (
    r"chaos/random_faults\.py::.*\[(?!1000\])",
    r"chaos/snapshots\.py::.*\[\d-25\]",
    r"chaos/mutated_messages\.py::.*\[1000000\]",
    r"chaos/torchs_own\.py::.*-all\]",
    r"test_contracts\.py::.*\[(coded-4|elastic\(period=2,asynchronous=False\)-3)-(?!exact|uneven)",
    r"test_contracts\.py::.*\[(ddp-2|single-1)-(?!exact|uneven|a_crash|success)",
    r"test_own_loops\.py::test_a_loop_ends.*-(allreduce-3|ddp \+ accumulate\(2\)-3)\]",
    r"test_own_loops\.py::test_a_loop_ends.*\[(clip_value|schedule_per_batch|parameter_groups|two_optimizers|gan_maker_first"
    r"|zeros_kept|two_losses|penalty_on_weights|called_twice|numbered_epochs|evaluated)-(ddp|allreduce \+)",
    r"test_own_loops\.py::test_closures.*-allreduce-2\]",
    r"test_own_loops\.py::test_who_does_not_come.*\[(sleeps|never_backward)",
    r"test_own_loops\.py::test_running_statistics.*\[ddp\]",
    r"test_own_models\.py::test_a_model_ends.*-(allreduce-3|allreduce\(gloo, bucket=0\.0001\)-2)\]",
    r"test_contracts\.py::.*\[allreduce\+accumulate\(3\)\+topk",
    r"test_own_models\.py::test_a_model_ends.*-allreduce \+ accumulate\(2\)-3\]",
    r"test_own_models\.py::test_a_model_ends.*\[(words_of_a_stream|all_frozen_at_first|recomputed_reentrant|odd_buffers)-",
    r"test_own_models\.py::test_what_ddp_cannot.*\[(unfrozen_later|all_frozen_at_first|methods)-",
    r"test_own_models\.py::test_ddp_trains_it_alike\[(frozen|complex_part|recomputed|several_outputs)\]",
    r"test_own_models\.py::test_a_compiled_model.*\[compiled\]",
    r"test_own_resume\.py::.*\[(map-epochs|2|ddp \+ accumulate\(3\)|1\.second\.3\.0)\]",
    r"test_server_faults\.py::test_the_others_go_on.*\[(bsp-1|ssp\(2\)-0|asp-0)\]",
    r"test_server_faults\.py::test_a_worker_that_was_silent.*\[(bsp|asp)\]",
    r"test_server_faults\.py::test_any_replica.*\[(0|2)\]",
    r"test_server_faults\.py::test_a_killed_server.*\[1\]",
    r"test_server_faults\.py::test_a_push_with_nan.*\[asp\]",
    r"test_server_strategies\.py::test_downpour_pushes.*\[(2-2-1|1-4-3)\]",
    r"test_server_strategies\.py::test_the_others_go_on.*\[(elastic\(period=2, asyn|downpour\(push=2)",
    r"test_server_strategies\.py::test_digits_are_learned\[(downpour\]|elastic\(period=8|coded\])",
    r"test_compressed_exchange\.py::test_allreduce_hands_back.*\[(2|3)-False\]",
    r"test_compressed_exchange\.py::test_digits_are_learned.*\[(quantize\(2\)|quantize\(4|topk \+ quantize)",
    r"test_compressed_exchange\.py::test_servers_learn.*topk",
    r"test_two_sided\.py::test_every_algorithm.*\[(2|3|4)\]",
    r"test_backend_stress\.py::.*\[3-0-1\]",
    r"test_any_backend\.py::test_sick_and_healthy.*\[(outer|cpu:other,cuda:gloo)\]",
    r"test_local\.py::test_a_period_of_one.*\[(schedule_per_epoch|two_losses|gan|evaluated)-local",
    r"test_backend_collectives\.py::.*\[(ab|aaaaa)\]",
    r"test_backend_groups\.py::.*\[aa\]",
    r"test_disturbances\.py::test_pauses_slow.*\[(single-1|ddp-2)\]",
    r"test_disturbances\.py::test_a_worker_is_killed.*\[ddp\]",
    r"test_gossip\.py::test_digits_are_learned.*\[(randomk|threshold)",
    r"test_gossip_faults\.py::test_random_kills.*\[1\]",
    r"test_failing_runs\.py::test_an_interrupt.*\[SIGTERM\]",
    r"test_servers\.py::test_what_a_scheduler.*shards=2",
    r"test_servers\.py::test_every_optimizer.*\[(SGD|Adagrad|RMSprop)\]",
    r"test_servers\.py::test_parameter_groups_keep.*\[momentum\]",
    r"test_servers\.py::test_a_parameter_that_gets_no_gradient.*\[momentum\]",
    r"test_server_renewal\.py::test_three_hundred",
    r"test_backend_failures\.py::test_a_rank_that_never_comes.*\[(False-100000|True-4)\]",
    r"test_joining_workers\.py::test_several_may_be_replaced",
    r"test_server_strategies\.py::test_coded_steps.*\[coded\(code=cyclic\)-worker 1",
    r"test_server_strategies\.py::test_coded_steps.*\[coded-worker 2",
    r"test_watch\.py::test_a_sick_run.*\[(starving|dead_server)\]",
    r"test_bad_input\.py::test_a_file_that_starts_a_run_when_imported",
    r"test_contracts_bite\.py::test_the_command_says_what_fails",
    r"test_tasks\.py::test_text_is_half_way",
    r"test_malloc\.py::test_what_the_user_has_set_stays",
    r"test_contracts\.py::.*\[(allreduce|gossip|local|server).*a_watched_run",
    r"test_contracts\.py::test_other_kinds.*\[(gossip\(exp|gossip \+|server\(shards|elastic|coded|ddp)",
    r"test_unseen_updates\.py::.*servers\[(server\(consistency=asp|server\]|downpour|elastic|coded)",
    r"test_docs\.py::test_a_documented_strategy.*\[(every_nth|one_byte)",
    r"test_commands\.py::test_a_documented.*\[(?!offbeat (keys new|ps|draw 'allreduce\(ring|explain runs/latest\])"
    r"|offbeat run (train\.py --workers 2 --target|examples/hanging)|python docs)",
    r"test_server_machines\.py::test_a_thousand",
    r"test_frames\.py::test_mutated_frames.*\[1000000\]",
    r"test_loaders\.py::test_nested_and_zipped.*\[shuffled\]",
    r"test_compressed_exchange\.py::test_without_feedback",
    r"test_draw\.py::test_what_is_planned.*\[(allreduce\(gloo|local|gossip\(exp|allreduce \+ half|gossip \+)",
    r"test_split_training\.py::test_twenty.*\[(?!(mlp-sgd-float32-4|tied text-adamw-float64-2|gpt2-adamw-float64-2)\])",
    r"test_algorithm_choice\.py::test_auto_sums.*\[(3|4)\]",
)
WIDE = re.compile("|".join(_PATTERNS))
