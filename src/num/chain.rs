//! The chain of the contract's second rule, in its plainest form: the oracle of every matrix product.

/// `acc = fma(a_k, b_k, acc)` from `+0.0` over the pairs in order.
pub fn chain_dot(pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
    pairs.fold(0.0, |acc, (a, b)| a.mul_add(b, acc))
}

/// Which of the two row-major operands is stored transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `A[m, k] · B[k, n]`, as in the gradient of an input.
    Nn,
    /// `A[m, k] · B[n, k]ᵀ`, as in a linear layer.
    Nt,
    /// `A[k, m]ᵀ · B[k, n]`, as in the gradient of a weight.
    Tn,
}

/// The sizes of a matrix product `C[m, n]` with `k` terms an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// How the operands are stored.
    pub layout: Layout,
}

impl Product {
    /// Where `A[row, term]` is stored.
    fn left(&self, row: usize, term: usize) -> usize {
        match self.layout {
            Layout::Nn | Layout::Nt => row * self.k + term,
            Layout::Tn => term * self.m + row,
        }
    }

    /// Where `B[term, column]` is stored.
    fn right(&self, term: usize, column: usize) -> usize {
        match self.layout {
            Layout::Nn | Layout::Tn => term * self.n + column,
            Layout::Nt => column * self.k + term,
        }
    }
}

/// The product `C[m, n]`, row-major, one chain an element. It is written to be read, not to be fast.
///
/// # Panics
/// When `a` has fewer than `m * k` elements or `b` fewer than `k * n`.
pub fn reference_matmul(product: &Product, a: &[f32], b: &[f32]) -> Vec<f32> {
    let mut c = Vec::with_capacity(product.m * product.n);
    for row in 0..product.m {
        for column in 0..product.n {
            c.push(chain_dot((0..product.k).map(|term| {
                (a[product.left(row, term)], b[product.right(term, column)])
            })));
        }
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0)
            .collect()
    }

    fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..columns * rows)
            .map(|i| x[i % rows * columns + i / rows])
            .collect()
    }

    #[test]
    fn the_three_layouts_give_one_product() {
        let (m, n, k) = (3, 5, 17);
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let of =
            |layout, a: &[f32], b: &[f32]| reference_matmul(&Product { m, n, k, layout }, a, b);
        let nn = of(Layout::Nn, &a, &b);
        assert_eq!(nn.len(), m * n);
        assert_eq!(nn, of(Layout::Nt, &a, &transposed(&b, k, n)));
        assert_eq!(nn, of(Layout::Tn, &transposed(&a, m, k), &b));
        assert_ne!(nn, of(Layout::Nt, &a, &b));
    }

    #[test]
    fn a_product_of_known_numbers() {
        let product = Product {
            m: 2,
            n: 2,
            k: 3,
            layout: Layout::Nn,
        };
        let (a, b) = (
            [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            [7.0, 8.0, 9.0, 10.0, 11.0, 12.0],
        );
        let c = reference_matmul(&product, &a, &b);
        assert_eq!(c, [58.0, 64.0, 139.0, 154.0]);
    }

    #[test]
    fn the_chain_is_fused_ascending_and_starts_at_positive_zero() {
        let e = f32::EPSILON;
        // The square of 1 + e holds e², which only a fused operation keeps.
        let fused = chain_dot([(-1.0, 1.0 + 2.0 * e), (1.0 + e, 1.0 + e)].into_iter());
        assert_eq!(fused, e * e);
        let pairs = [(1e8, 1.0), (1.0, 1.0), (-1e8, 1.0)];
        assert_eq!(chain_dot(pairs.into_iter()), 0.0);
        assert_eq!(chain_dot(pairs.into_iter().rev()), 0.0);
        let reordered = [pairs[0], pairs[2], pairs[1]];
        assert_eq!(chain_dot(reordered.into_iter()), 1.0);
        assert_eq!(chain_dot([(-0.0, 1.0)].into_iter()).to_bits(), 0);
        assert_eq!(chain_dot(std::iter::empty()).to_bits(), 0);
    }
}
