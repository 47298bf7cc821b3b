//! Images in a prompt, as the control plane sees them: which positions stand for one, what tells two apart, and where a
//! chunk may not end.
//!
//! What an encoder makes of an image is kept in blocks of the one pool (`cache`), where there are free ones: nobody is
//! pushed out or kept waiting for it. A step that reaches an image tells the worker where its outputs are or go to.
//!
//! Not here: pixels, which travel to the worker unread (`AddRequest::media_data`), and which of a span's tokens take an
//! encoder's output (the worker's business).

use crate::ids::BlockId;

/// Most bytes of images that requests may bring, those of waiting and running ones together.
pub const MAX_MEDIA_BYTES: u64 = 4 << 30;

/// Positions `start .. start + len` of a prompt stand for one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaSpan {
    pub start: u32,
    pub len: u32,
    /// Of everything that the model sees of the image: equal digests mean equal encoder outputs.
    pub digest: u128,
    /// Its tokens attend to each other in both directions: they must be computed in one step.
    pub is_whole: bool,
}

impl MediaSpan {
    pub fn end(&self) -> u32 {
        self.start.saturating_add(self.len)
    }

    fn overlaps(&self, start: u32, end: u32) -> bool {
        self.start < end && start < self.end()
    }
}

/// Bytes of an encoder's outputs for one position of a prompt, and of a block of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputBytes {
    pub of_token: u64,
    pub of_block: u64,
}

impl OutputBytes {
    /// Blocks that an image's outputs take, at most.
    pub fn num_blocks(self, span: &MediaSpan) -> usize {
        (u64::from(span.len) * self.of_token).div_ceil(self.of_block) as usize
    }
}

/// Where the outputs of an image are that a step reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedOutputs {
    pub digest: u128,
    pub blocks: Vec<BlockId>,
    /// They are there; else the step makes them and puts them there.
    pub is_filled: bool,
}

/// The images that have a position within `start .. end`.
pub fn within(spans: &[MediaSpan], start: u32, end: u32) -> impl Iterator<Item = &MediaSpan> {
    spans.iter().filter(move |span| span.overlaps(start, end))
}

/// How many of the `len` positions from `start` a row may cover so that it cuts no whole image: fewer, or, if an image
/// has begun, up to `most`; 0 when there is no such row.
pub fn uncut_len(spans: &[MediaSpan], start: u32, len: u32, most: u32) -> u32 {
    let end = start + len;
    let cut = within(spans, start, end).find(|span| span.is_whole && end < span.end());
    match cut {
        None => len,
        Some(span) if span.start > start => span.start - start,
        Some(span) if span.end() - start <= most => span.end() - start,
        Some(_) => 0,
    }
}

/// The fewest positions from `start` that a row may cover: one, or all that is left of a whole image that is there.
pub fn least_len(spans: &[MediaSpan], start: u32) -> u32 {
    within(spans, start, start + 1)
        .find(|span| span.is_whole)
        .map_or(1, |span| span.end() - start)
}

/// What is wrong with a prompt's spans, if anything is.
pub fn problem(spans: &[MediaSpan], num_prompt_tokens: u32, max_row: u32) -> Option<String> {
    let mut end = 0;
    for span in spans {
        if span.len == 0 || span.start < end || span.end() > num_prompt_tokens {
            return Some(format!(
                "an image at positions {} to {} does not fit the prompt of {num_prompt_tokens} tokens",
                span.start,
                span.end()
            ));
        }
        if span.is_whole && span.len > max_row {
            return Some(format!(
                "an image has {} tokens, which must be computed in one step of at most {max_row}: raise --max-num-batched-tokens",
                span.len
            ));
        }
        end = span.end();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u32, len: u32, is_whole: bool) -> MediaSpan {
        MediaSpan {
            start,
            len,
            digest: 7,
            is_whole,
        }
    }

    #[test]
    fn rows_end_before_or_after_a_whole_image() {
        let spans = [span(4, 4, false), span(10, 6, true)];
        assert_eq!(uncut_len(&spans, 0, 6, 100), 6); // the first image may be cut
        assert_eq!(uncut_len(&spans, 0, 10, 100), 10);
        assert_eq!(uncut_len(&spans, 0, 12, 100), 10);
        assert_eq!(uncut_len(&spans, 0, 16, 100), 16);
        assert_eq!(uncut_len(&spans, 10, 3, 100), 6);
        assert_eq!(uncut_len(&spans, 13, 1, 3), 3); // after a prefix hit within it
        assert_eq!(uncut_len(&spans, 10, 3, 5), 0);
        assert_eq!(least_len(&spans, 2), 1);
        assert_eq!(least_len(&spans, 10), 6);
        assert_eq!(least_len(&spans, 13), 3);
        assert_eq!(least_len(&spans, 16), 1);
    }

    #[test]
    fn spans_lie_in_order_within_the_prompt() {
        assert_eq!(problem(&[span(0, 2, true), span(2, 3, false)], 5, 2), None);
        for spans in [
            [span(0, 3, false), span(2, 3, false)],
            [span(0, 0, false), span(2, 3, false)],
            [span(0, 2, false), span(u32::MAX, 3, false)],
        ] {
            assert!(problem(&spans, 5, 9).unwrap().contains("does not fit"));
        }
        let wide = problem(&[span(0, 3, true)], 5, 2).unwrap();
        assert!(wide.contains("--max-num-batched-tokens"), "{wide}");
    }
}
