//! The command line as a person sees it: the built binary, its output and its exit codes.

mod checks;
