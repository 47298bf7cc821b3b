//! Probabilities as integers, whose sums are exact in any order; the thresholds that top-k, top-p and min-p make of
//! them, and the draw by exponential races (Gumbel 1954; Maddison et al. 2014, "A* sampling"). The functions are those
//! of `octavo.sampling`.

use super::uniform::Stream;

/// The most probable token weighs 2^40.
const TOP_WEIGHT: f32 = (1u64 << 40) as f32;
/// Tokens of a group.
const GROUP: usize = 256;

/// floor(exp(x - top) * 2^40); 0 for -inf.
pub fn weight(x: f32, top: f32) -> u64 {
    ((x - top).exp() * TOP_WEIGHT) as u64
}

/// The largest value, at least the lowest finite number.
pub fn greatest(logits: &[f32]) -> f32 {
    logits.iter().copied().fold(f32::MIN, f32::max)
}

/// The least value that top-k (0: no limit), then top-p of what it left, keep; ties with the last one kept are kept.
pub fn nucleus_threshold(logits: &[f32], top_k: usize, top_p: f64) -> f32 {
    let top = greatest(logits);
    let limit = if top_k == 0 { logits.len() } else { top_k };
    let total: u64 = if top_k == 0 && top_p < 1.0 {
        logits.iter().map(|&x| weight(x, top)).sum()
    } else {
        0
    };
    let mut kept = candidates(logits, limit, top_k, top_p, top, total);
    let order = |a: &f32, b: &f32| b.total_cmp(a);
    if limit < kept.len() {
        kept.select_nth_unstable_by(limit - 1, order);
        kept.truncate(limit);
    }
    kept.sort_unstable_by(order);
    if top_p >= 1.0 {
        return kept.last().copied().unwrap_or(f32::NEG_INFINITY);
    }
    let total = if top_k == 0 {
        total
    } else {
        kept.iter().map(|&x| weight(x, top)).sum()
    };
    let mass = top_p * total as f64;
    let mut before = 0u64;
    let mut last = top;
    for &x in &kept {
        if before as f64 >= mass {
            break;
        }
        last = x;
        before += weight(x, top);
    }
    last
}

/// The logits that may matter. Tokens lighter than (1 - p) * total / v weigh less than (1 - p) * total together: the
/// others reach p without them.
fn candidates(
    logits: &[f32],
    limit: usize,
    top_k: usize,
    top_p: f64,
    top: f32,
    total: u64,
) -> Vec<f32> {
    if top_k > 0 || top_p >= 1.0 || limit < logits.len() {
        return logits.to_vec();
    }
    let light = (1.0 - top_p) * total as f64 / logits.len() as f64 * (1.0 - 1e-6);
    let enough = |&x: &f32| weight(x, top) >= light as u64;
    logits.iter().copied().filter(enough).collect()
}

/// Token i with probability softmax(logits)[i]; 0 when all are -inf.
pub fn draw(logits: &[f32], stream: Stream) -> usize {
    let top = greatest(logits);
    let groups = logits.chunks(GROUP);
    let num_groups = groups.len();
    let sums = groups.map(|group| group.iter().map(|&x| weight(x, top)).sum::<u64>());
    let group = race(sums, stream, 0);
    let start = group * GROUP;
    let members = logits[start..logits.len().min(start + GROUP)].iter();
    start + race(members.map(|&x| weight(x, top)), stream, num_groups as u32)
}

/// Of weights w and exponential numbers E the place of the first largest w / E; place i has the stream's number
/// `column` + i.
fn race(weights: impl Iterator<Item = u64>, stream: Stream, column: u32) -> usize {
    let (mut winner, mut best) = (0, 0.0);
    for (place, weight) in weights.enumerate().filter(|&(_, weight)| weight > 0) {
        let uniform = stream.uniform(column + place as u32).max(0.5f64.powi(54));
        let score = weight as f64 / -(-uniform).ln_1p();
        if score > best {
            (winner, best) = (place, score);
        }
    }
    winner
}

/// The largest logit's token, the lowest id on ties; 0 when all are -inf.
pub fn argmax(logits: &[f32]) -> usize {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&x| x >= top).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, by a full sort.
    fn plain_threshold(logits: &[f32], top_k: usize, top_p: f64) -> f32 {
        let mut sorted = logits.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        if top_k > 0 {
            sorted.truncate(top_k);
        }
        let weights: Vec<u64> = sorted.iter().map(|&x| weight(x, sorted[0])).collect();
        let mass = top_p * weights.iter().sum::<u64>() as f64;
        let mut sum = 0;
        let mut kept = 0;
        for weight in weights {
            if sum as f64 >= mass && top_p < 1.0 {
                break;
            }
            sum += weight;
            kept += 1;
        }
        sorted[kept.max(1) - 1]
    }

    proptest! {
        #[test]
        fn thresholds_are_those_of_the_definition(
            logits in prop::collection::vec(-20f32..20.0, 1..600),
            top_k in 0usize..700,
            top_p in prop_oneof![Just(1.0), 0.01f64..1.0],
        ) {
            let found = nucleus_threshold(&logits, top_k, top_p);
            prop_assert_eq!(found.to_bits(), plain_threshold(&logits, top_k, top_p).to_bits());
        }
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits: Vec<f32> = (0..600)
            .map(|i| {
                if i % 100 == 7 {
                    (i / 100) as f32 * 0.5
                } else {
                    f32::NEG_INFINITY
                }
            })
            .collect();
        let total: f32 = (0..6).map(|i| (i as f32 * 0.5).exp()).sum();
        let mut counts = [0u32; 6];
        for position in 0..6000 {
            let token = draw(
                &logits,
                Stream {
                    seed: 5,
                    index: 0,
                    position,
                },
            );
            assert_eq!(token % 100, 7);
            counts[token / 100] += 1;
        }
        for (i, &count) in counts.iter().enumerate() {
            let expected = 6000.0 * (i as f32 * 0.5).exp() / total;
            assert!(
                (count as f32 - expected).abs() < 5.0 * expected.sqrt(),
                "{i}: {count} of {expected}"
            );
        }
    }

    #[test]
    fn rows_of_nothing_give_token_0() {
        let nothing = vec![f32::NEG_INFINITY; 300];
        let stream = Stream {
            seed: 0,
            index: 0,
            position: 0,
        };
        assert_eq!((argmax(&nothing), draw(&nothing, stream)), (0, 0));
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }
}
