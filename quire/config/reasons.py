"""Why an option that is taken has no effect, in the words of the log, --help and the reference. For declarations."""

ONE_DEVICE = "one process runs the whole model in this version, so there is nothing it could change"
TEXT_ONLY = "this version takes text only"
NO_COMPILER = "no model is compiled here: kernels are written by hand"
OWN_KERNELS = "Quire has kernels of its own, and chooses them by machine and shape"
OWN_GRAPHS = "graphs are captured once per size, without adapters"
OWN_REUSE = "prefixes and states are kept in Quire's own way"
EQUAL_MODES = "defaults suit both; --max-num-seqs and --max-num-batched-tokens lean one way"
