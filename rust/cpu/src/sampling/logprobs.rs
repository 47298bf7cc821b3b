//! Log probabilities of the model's own distribution, their top tokens and ranks, as `octavo.sampling.logprobs`.

/// log(sum(exp(x))), with the largest logit taken out; `shift` is subtracted from a logit to get its logprob.
pub fn shift(logits: &[f32]) -> f32 {
    let top = super::weights::greatest(logits);
    let total: f64 = logits.iter().map(|&x| f64::from((x - top).exp())).sum();
    top + total.max(f64::from(f32::MIN_POSITIVE)).ln() as f32
}

/// The logprobs of `token`, then of the `num_top` most probable ones (by value, then by id), into the front of `ids` and
/// `values`; the rank of `token` (1: nothing is more probable).
pub fn gather(
    logits: &[f32],
    token: usize,
    num_top: usize,
    ids: &mut [i32],
    values: &mut [f32],
) -> i32 {
    let shift = shift(logits);
    let own = logits[token];
    ids[0] = token as i32;
    values[0] = own - shift;
    let num_top = num_top.min(logits.len());
    if num_top > 0 {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_value = |a: &u32, b: &u32| {
            let (x, y) = (logits[*a as usize] + 0.0, logits[*b as usize] + 0.0);
            y.total_cmp(&x).then(a.cmp(b))
        };
        if num_top < order.len() {
            order.select_nth_unstable_by(num_top - 1, by_value);
            order.truncate(num_top);
        }
        order.sort_unstable_by(by_value);
        for (place, id) in order.into_iter().enumerate() {
            ids[1 + place] = id as i32;
            values[1 + place] = logits[id as usize] - shift;
        }
    }
    1 + logits.iter().filter(|&&x| x > own).count() as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tops_ranks_and_values() {
        let logits = [0.0, 2.0, -1.0, 2.0, f32::NEG_INFINITY];
        let (mut ids, mut values) = ([0; 4], [0.0; 4]);
        let rank = gather(&logits, 0, 3, &mut ids, &mut values);
        assert_eq!((rank, ids), (3, [0, 1, 3, 0]));
        let total: f32 = logits.iter().map(|x| x.exp()).sum();
        for (id, value) in ids.iter().zip(values) {
            assert!((value - (logits[*id as usize] - total.ln())).abs() < 1e-6);
        }
    }
}
