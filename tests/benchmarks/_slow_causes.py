"""The reason why each loop of `_slow_steps.py` and `_other_steps.py` is slow.

Each by the name of the rule that says so. Where the quicker loop does the work in another unit (a
larger batch), both do the same work.
"""

CAUSES: dict[str, tuple[str, ...]] = {
    "pictures_one_by_one": ("workers",),
    "rows_of_a_table": ("in_memory",),
    "short_epochs": ("worker_start",),
    "sentences_of_one_length": ("padding",),
    "two_at_a_time": ("small_batch",),
    "counting_hits": ("synchronizations", "slow_lines"),
    "numbers_in_lists": ("tensor_of_list",),
    "summed_losses": ("graph_kept",),
    "zeros": ("set_to_none",),
    "validating": ("no_grad",),
    "looking_for_nan": ("anomaly_mode",),
    "frozen_body": ("frozen_gradients",),
    "held_for_nothing": ("frozen_in_optimizer",),
    "graph_of_gradients": ("graphs_of_graphs",),
    "asked_twice": ("same_forward_twice",),
    "numbers_from_numpy": ("double_precision",),
    "moment_by_moment": ("recurrent_cells",),
    "attention_from_a_paper": ("attention_by_hand",),
    "one_after_another": ("one_by_one",),
    "norm_by_hand": ("parameter_loops",),
    "averaged_weights": ("parameter_loops",),
    "plain_optimizer": ("catalog",),
    "tidy": ("cleaning",),
    "saved_each_time": ("copied_state",),
    "report_each_time": ("writing",),
    "scores_by_a_library": ("slow_lines",),
    "watched_input": ("input_gradients",),
    "weights_moved_by_hand": ("parameter_loops",),
}

OTHER_CAUSES: dict[str, tuple[str, ...]] = {
    "cnn_pictures": ("kept_samples",),
    "gnn_citations": ("sparse_products",),
    "film_ratings": ("dense_embeddings",),
    "tabular_churn": ("slow_lines",),
    "segment_slices": ("growing_copies",),
}
