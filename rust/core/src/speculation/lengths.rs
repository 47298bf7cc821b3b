//! How long each row's draft shall be, so that the step yields the most tokens a second by what is expected.
//!
//! A row whose drafted tokens are right at a rate `a` keeps the i-th with probability a^i. It is worth its time when it
//! brings more than the step does without: a^i > time of a token * rows / time of the step. Together they must also be
//! worth what any draft costs. Times and rates are inexact: what gains little is left.

use super::cost::DraftPrice;

/// What must be gained, in parts of what is paid.
const LEAST_GAIN: f64 = 1.1;

/// What could be drafted for a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    pub num_tokens: u32,
    /// Share of right ones.
    pub rate: f64,
}

/// Tokens to draft for each of `offers`, in a step of `num_rows` rows. `num_missed`: tokens that a row with a draft
/// loses because its next step waits for the result.
pub fn choose_lengths(
    offers: &[Offer],
    price: &DraftPrice,
    num_rows: u32,
    num_missed: u32,
) -> Vec<u32> {
    let least = least_chance(price, num_rows);
    let mut left = price.max_tokens;
    let (mut num_tokens, mut gain) = (0, 0.0);
    let mut lengths = vec![0; offers.len()];
    for (length, offer) in lengths.iter_mut().zip(offers) {
        let (fitting, expected) = worthwhile(offer, left, least);
        let own_gain = expected - f64::from(num_missed);
        if own_gain > 0.0 {
            *length = fitting;
            left -= fitting;
            num_tokens += fitting;
            gain += own_gain;
        }
    }
    let cost_ms = price.fixed_ms + price.ms_per_token * f64::from(num_tokens);
    if gain * price.plain_ms < LEAST_GAIN * cost_ms * f64::from(num_rows) {
        lengths.fill(0);
    }
    lengths
}

/// Below this chance of being right no drafted token is worth its time; 1 and more: none is.
pub fn least_chance(price: &DraftPrice, num_rows: u32) -> f64 {
    LEAST_GAIN * price.ms_per_token * f64::from(num_rows) / price.plain_ms.max(1e-9)
}

/// How many tokens of an offer, at most `most`, have at least that chance, and how many of them will be right.
fn worthwhile(offer: &Offer, most: u32, least: f64) -> (u32, f64) {
    let (mut chance, mut expected, mut length) = (1.0, 0.0, 0);
    while length < offer.num_tokens.min(most) {
        chance *= offer.rate;
        if chance < least {
            break;
        }
        expected += chance;
        length += 1;
    }
    (length, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(rate: f64) -> Offer {
        Offer {
            num_tokens: 7,
            rate,
        }
    }

    const CHEAP: DraftPrice = DraftPrice {
        plain_ms: 6.0,
        fixed_ms: 0.0,
        ms_per_token: 1.5,
        max_tokens: 16,
    };

    #[test]
    fn good_drafts_are_long_and_bad_ones_short() {
        let lengths = |rate| choose_lengths(&[offer(rate)], &CHEAP, 1, 0)[0];
        assert_eq!([0.95, 0.6, 0.3, 0.2].map(lengths), [7, 2, 1, 0]);
    }

    #[test]
    fn nothing_is_drafted_where_a_token_costs_as_much_as_a_row() {
        let dear = DraftPrice {
            ms_per_token: 6.1,
            ..CHEAP
        };
        assert_eq!(choose_lengths(&[offer(1.0)], &dear, 1, 0), [0]);
        // The same step with four rows costs less a row than a drafted token.
        assert_eq!(choose_lengths(&[offer(0.9); 4], &CHEAP, 4, 0), [0; 4]);
    }

    #[test]
    fn the_fixed_part_is_shared() {
        let price = DraftPrice {
            plain_ms: 24.0,
            fixed_ms: 20.0,
            ..CHEAP
        };
        assert_eq!(choose_lengths(&[offer(0.9)], &price, 4, 0), [0]);
        assert_eq!(choose_lengths(&[offer(0.9); 2], &price, 4, 0), [7, 7]);
    }

    #[test]
    fn limits_and_waiting_count() {
        assert_eq!(choose_lengths(&[offer(1.0); 3], &CHEAP, 1, 0), [7, 7, 2]);
        assert_eq!(choose_lengths(&[offer(0.5)], &CHEAP, 1, 1), [0]);
        assert_eq!(choose_lengths(&[offer(0.9)], &CHEAP, 1, 1), [7]);
    }
}
