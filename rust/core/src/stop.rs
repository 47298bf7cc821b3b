//! Stop strings, found in text that comes in pieces: the pieces never change what is found.
//!
//! The stop string that is complete first ends the text; of several that end at the same character, the longest.
//! Text that may turn out to belong to one is held back. One Knuth-Morris-Pratt automaton per stop string, so the
//! work per byte is the number of stop strings. Not here: ids and half characters (`detokenizer`).

use std::sync::Arc;

/// The stop strings of a request, shared by its sequences.
#[derive(Debug, Default)]
pub struct StopSet {
    patterns: Vec<Pattern>,
}

#[derive(Debug)]
struct Pattern {
    text: String,
    /// Entry i: length of the longest proper prefix that also ends at byte i.
    borders: Vec<u32>,
}

impl Pattern {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut borders = vec![0; bytes.len()];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = borders[matched - 1] as usize;
            }
            if bytes[at] == bytes[matched] {
                matched += 1;
            }
            borders[at] = matched as u32;
        }
        Self { text, borders }
    }

    /// The longest prefix but the whole that ends where one of length `matched` does.
    fn incomplete(&self, matched: usize) -> usize {
        if matched == self.text.len() {
            self.borders[matched - 1] as usize
        } else {
            matched
        }
    }

    /// The length of the longest prefix that ends with `byte`, when one of length `matched` ended before it.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        let bytes = self.text.as_bytes();
        matched = self.incomplete(matched);
        while matched > 0 && bytes[matched] != byte {
            matched = self.borders[matched - 1] as usize;
        }
        if bytes[matched] == byte {
            matched + 1
        } else {
            matched
        }
    }
}

impl StopSet {
    /// Empty strings stop nothing.
    pub fn new(texts: impl IntoIterator<Item = String>) -> Self {
        let texts = texts.into_iter().filter(|text| !text.is_empty());
        Self {
            patterns: texts.map(Pattern::new).collect(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }
}

/// The search in one sequence's text.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    set: Arc<StopSet>,
    include_in_output: bool,
    /// Per stop string: how much of it ends the text so far.
    matched: Vec<usize>,
    /// The end of the text that may belong to a stop string.
    held: String,
}

impl StopMatcher {
    /// With `include_in_output` the text ends after the stop string, else before it.
    pub fn new(set: Arc<StopSet>, include_in_output: bool) -> Self {
        let matched = vec![0; set.patterns.len()];
        Self {
            set,
            include_in_output,
            matched,
            held: String::new(),
        }
    }

    /// Appends to `out` what is certain to be shown after `text`. Returns the stop string that ends the text, if one
    /// does; nothing may be pushed after that. Without `may_stop`, stop strings that end in `text` don't count.
    pub fn push(&mut self, text: &str, may_stop: bool, out: &mut String) -> Option<&str> {
        let old_len = self.held.len();
        self.held.push_str(text);
        let found = text.bytes().enumerate().find_map(|(at, byte)| {
            let longest = self.advance(byte).filter(|_| may_stop)?;
            Some((old_len + at + 1, longest))
        });
        if let Some((end, pattern)) = found {
            let stop = self.set.patterns[pattern].text.as_str();
            let shown = if self.include_in_output {
                end
            } else {
                end - stop.len()
            };
            out.push_str(&self.held[..shown]);
            self.held.clear();
            return Some(stop);
        }
        let num_held = self.num_matched();
        let certain = self.held.len() - num_held;
        out.push_str(&self.held[..certain]);
        self.held.drain(..certain);
        None
    }

    /// Appends what was held back: the text has ended.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// How much of the text's end may belong to a stop string that is not complete.
    fn num_matched(&self) -> usize {
        let patterns = self.set.patterns.iter().zip(&self.matched);
        patterns
            .map(|(pattern, matched)| pattern.incomplete(*matched))
            .max()
            .unwrap_or(0)
    }

    /// Advances every automaton; returns the longest stop string that is complete.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut longest: Option<usize> = None;
        for (at, (pattern, matched)) in self.set.patterns.iter().zip(&mut self.matched).enumerate()
        {
            *matched = pattern.advance(*matched, byte);
            let is_longer =
                longest.is_none_or(|best| self.set.patterns[best].text.len() < pattern.text.len());
            if *matched == pattern.text.len() && is_longer {
                longest = Some(at);
            }
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str], include_in_output: bool) -> StopMatcher {
        let set = StopSet::new(stops.iter().map(|stop| (*stop).to_owned()));
        StopMatcher::new(Arc::new(set), include_in_output)
    }

    /// What is shown after each piece and at the end, and the stop string found.
    fn run(matcher: &mut StopMatcher, pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut shown = Vec::new();
        for piece in pieces {
            let mut out = String::new();
            let stop = matcher.push(piece, true, &mut out).map(str::to_owned);
            shown.push(out);
            if stop.is_some() {
                return (shown, stop);
            }
        }
        let mut out = String::new();
        matcher.finish(&mut out);
        shown.push(out);
        (shown, None)
    }

    #[test]
    fn text_that_may_belong_to_a_stop_string_waits() {
        let pieces = ["one ", "tw", "o t", "hree", "!"];
        let (shown, stop) = run(&mut matcher(&["two three"], false), &pieces);
        assert_eq!(shown, ["one ", "", "", ""]);
        assert_eq!(stop.as_deref(), Some("two three"));
        let (shown, stop) = run(&mut matcher(&["two thrive"], false), &pieces);
        assert_eq!(shown, ["one ", "", "", "two three", "!", ""]);
        assert_eq!(stop, None);
        let (shown, _) = run(&mut matcher(&["zzz"], false), &["az", "z"]);
        assert_eq!(shown, ["a", "", "zz"]);
    }

    #[test]
    fn the_stop_string_is_kept_when_asked_for() {
        let (shown, stop) = run(&mut matcher(&["END"], true), &["a E", "ND b"]);
        assert_eq!(shown, ["a ", "END"]);
        assert_eq!(stop.as_deref(), Some("END"));
    }

    #[test]
    fn the_first_complete_one_wins_and_then_the_longest() {
        let (shown, stop) = run(&mut matcher(&["abcd", "bc"], false), &["xabcd"]);
        assert_eq!(
            (shown.concat().as_str(), stop.as_deref()),
            ("xa", Some("bc"))
        );
        let (shown, stop) = run(&mut matcher(&["bc", "abc"], false), &["xabcd"]);
        assert_eq!(
            (shown.concat().as_str(), stop.as_deref()),
            ("x", Some("abc"))
        );
        let (shown, stop) = run(&mut matcher(&["aab"], false), &["aa", "a", "b"]);
        assert_eq!(
            (shown.concat().as_str(), stop.as_deref()),
            ("a", Some("aab"))
        );
    }

    #[test]
    fn what_is_complete_too_early_does_not_count() {
        let mut matcher = matcher(&["aba"], false);
        let mut out = String::new();
        assert_eq!(matcher.push("xaba", false, &mut out), None);
        assert_eq!(out, "xab");
        assert_eq!(matcher.push("b", true, &mut out), None);
        assert_eq!(matcher.push("a!", true, &mut out), Some("aba"));
        assert_eq!(out, "xab");
    }

    #[test]
    fn characters_stay_whole() {
        let (shown, stop) = run(&mut matcher(&["é😀"], false), &["é", "é", "😁", "é", "😀"]);
        assert_eq!(shown, ["", "é", "é😁", "", ""]);
        assert_eq!(stop.as_deref(), Some("é😀"));
    }

    /// Straight from the definition, on the whole text.
    fn search(text: &str, stops: &[String], include: bool) -> (String, Option<String>) {
        for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let ending = stops
                .iter()
                .filter(|stop| text[..end].ends_with(stop.as_str()));
            if let Some(stop) = ending.max_by_key(|stop| stop.len()) {
                let shown = if include { end } else { end - stop.len() };
                return (text[..shown].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn pieces_never_change_what_is_found(
            pieces in proptest::collection::vec("[abé]{0,4}", 0..12),
            stops in proptest::collection::vec("[abé]{1,5}", 0..4),
            include in any::<bool>(),
        ) {
            let set = StopSet::new(stops.clone());
            let mut matcher = StopMatcher::new(Arc::new(set), include);
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (shown, stop) = run(&mut matcher, &pieces);
            prop_assert_eq!((shown.concat(), stop), search(&pieces.concat(), &stops, include));
        }

        #[test]
        fn no_more_than_a_stop_string_is_held(text in "[ab]{0,40}", stop in "[ab]{1,6}") {
            let set = StopSet::new([stop.clone()]);
            let mut matcher = StopMatcher::new(Arc::new(set), false);
            let mut out = String::new();
            if matcher.push(&text, true, &mut out).is_none() {
                prop_assert!(text.len() - out.len() < stop.len());
                prop_assert!(stop.starts_with(&text[out.len()..]));
            }
        }
    }
}
