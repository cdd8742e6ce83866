//! What the types rule out: each program of `compile_fail` must be refused by the compiler.

#[test]
fn misuse_of_a_state_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
