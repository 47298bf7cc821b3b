//! Incremental text against the `tokenizers` crate's own decoding of all ids, for every kind of decoder.
#![allow(clippy::unwrap_used)]

use octavo_core::detokenizer::Detokenizer;
use octavo_core::tokenizer::Tokenizer;
use proptest::prelude::*;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::bpe::BPEDecoder;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::decoders::ctc::CTC;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::metaspace::{Metaspace, PrependScheme};
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::decoders::wordpiece::WordPiece;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::normalizers::replace::Replace;
use tokenizers::{AddedToken, Tokenizer as Reference};

/// Tokens that mean something to some decoder, beside the 256 byte tokens.
const WORDS: &[&str] = &[
    "a", "b", "é", "你", "😀", "▁", "▁▁", "▁a", "▁你", "a▁b", "##ing", "##é", ".", "!", "'s",
    "n't", "lo</w>", "w</w>", "", "Ġ", "Ġt", "ĠÐ", "ðŁĺ", "Ģ", "Ã", "Ċ", " ", " x",
];
const SPECIALS: &[&str] = &["<s>", "</s>", "<|im_end|>"];
const NUM_BYTES: u32 = 256;

/// The disguise of a byte in byte-level vocabularies, told by the reference's own alphabet.
fn byte_tokens(is_byte_level: bool) -> Vec<String> {
    if !is_byte_level {
        return (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
    }
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let (hidden, plain): (Vec<char>, Vec<char>) =
        alphabet.into_iter().partition(|c| u32::from(*c) > 255);
    let mut hidden = hidden.into_iter();
    (0..=255u8)
        .map(|byte| {
            let itself = char::from(byte);
            if plain.contains(&itself) {
                itself
            } else {
                hidden.next().unwrap()
            }
            .to_string()
        })
        .collect()
}

fn reference(decoder: Option<DecoderWrapper>) -> Reference {
    let is_byte_level = matches!(decoder, Some(DecoderWrapper::ByteLevel(_)));
    let tokens = byte_tokens(is_byte_level)
        .into_iter()
        .chain(WORDS.iter().map(|word| (*word).to_owned()));
    let mut vocab: Vec<String> = Vec::new();
    for token in tokens {
        let is_new = !vocab.contains(&token);
        vocab.push(if is_new {
            token
        } else {
            format!("{token}{token}")
        });
    }
    let vocab = vocab
        .into_iter()
        .enumerate()
        .map(|(id, token)| (token, id as u32))
        .collect();
    let model = WordLevel::builder()
        .vocab(vocab)
        .unk_token("a".to_owned())
        .build()
        .unwrap();
    let mut reference = Reference::new(model);
    reference.with_decoder(decoder);
    reference
        .add_special_tokens(SPECIALS.map_tokens(true))
        .unwrap();
    reference
        .add_tokens(["two words", "über"].map_tokens(false))
        .unwrap();
    reference
}

trait MapTokens {
    fn map_tokens(&self, is_special: bool) -> Vec<AddedToken>;
}

impl MapTokens for [&str] {
    fn map_tokens(&self, is_special: bool) -> Vec<AddedToken> {
        self.iter()
            .map(|token| AddedToken::from(*token, is_special))
            .collect()
    }
}

fn tokenizer(reference: &Reference) -> Tokenizer {
    Tokenizer::from_json(reference.to_string(false).unwrap().as_bytes()).unwrap()
}

fn blanks() -> DecoderWrapper {
    Replace::new("▁", " ").unwrap().into()
}

fn sequence(decoders: Vec<DecoderWrapper>) -> DecoderWrapper {
    Sequence::new(decoders).into()
}

fn decoders() -> Vec<(&'static str, Option<DecoderWrapper>)> {
    let fallback = || ByteFallback::new().into();
    let fuse = || Fuse::new().into();
    let metaspace = |scheme| Metaspace::new('▁', scheme, true).into();
    vec![
        ("byte level", Some(ByteLevel::default().into())),
        (
            "llama",
            Some(sequence(vec![
                blanks(),
                fallback(),
                fuse(),
                Strip::new(' ', 1, 0).into(),
            ])),
        ),
        ("gemma", Some(sequence(vec![blanks(), fallback(), fuse()]))),
        (
            "two blanks",
            Some(sequence(vec![
                blanks(),
                fallback(),
                fuse(),
                Strip::new(' ', 2, 0).into(),
            ])),
        ),
        (
            "each stripped",
            Some(sequence(vec![
                blanks(),
                fallback(),
                Strip::new(' ', 1, 0).into(),
            ])),
        ),
        (
            "metaspace after bytes",
            Some(sequence(vec![fallback(), metaspace(PrependScheme::Always)])),
        ),
        ("metaspace", Some(metaspace(PrependScheme::Always))),
        (
            "metaspace, never prepended",
            Some(metaspace(PrependScheme::Never)),
        ),
        (
            "word pieces",
            Some(WordPiece::new("##".to_owned(), true).into()),
        ),
        (
            "word pieces, raw",
            Some(WordPiece::new("##".to_owned(), false).into()),
        ),
        ("word ends", Some(BPEDecoder::default().into())),
        ("none", None),
    ]
}

/// Ids of whole characters, byte by byte, between ids of any kind: at most 32 of them.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    let last = NUM_BYTES + (WORDS.len() + SPECIALS.len()) as u32 + 4;
    let character = proptest::sample::select(vec!["é", "你", "😀", "a", " ", "\u{301}", "▁"])
        .prop_map(|text| text.bytes().map(u32::from).collect::<Vec<_>>());
    let any = (0..last).prop_map(|id| vec![id]);
    let word = (NUM_BYTES..last).prop_map(|id| vec![id]);
    proptest::collection::vec(prop_oneof![3 => character, 1 => any, 3 => word], 0..8)
        .prop_map(|fragments| fragments.concat())
}

fn text_of(detokenizer: &mut Detokenizer, tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut text = String::new();
    for id in ids {
        detokenizer.push(tokenizer.pieces(), *id, &mut text);
    }
    detokenizer.finish(tokenizer.pieces(), &mut text);
    text
}

/// Ids that stand for text.
fn visible(reference: &Reference, ids: &[u32], skip: bool) -> Vec<u32> {
    let is_visible = |id: &u32| {
        let token = reference.id_to_token(*id);
        token.is_some_and(|token| !skip || !SPECIALS.contains(&token.as_str()))
    };
    ids.iter().copied().filter(is_visible).collect()
}

fn decode(reference: &Reference, ids: &[u32], skip: bool) -> String {
    // `BPEDecoder` panics on no tokens at all.
    if visible(reference, ids, skip).is_empty() {
        String::new()
    } else {
        reference.decode(ids, skip).unwrap()
    }
}

fn is_byte(reference: &Reference, id: Option<u32>) -> bool {
    let token = id.and_then(|id| reference.id_to_token(id));
    token.is_some_and(|token| token.starts_with("<0x"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 4))]

    #[test]
    fn pieces_joined_are_the_whole(cases in proptest::collection::vec((ids(), any::<bool>()), 20)) {
        for (name, decoder) in decoders() {
            let reference = reference(decoder);
            let tokenizer = tokenizer(&reference);
            for (ids, skip) in &cases {
                prop_assert_eq!(
                    tokenizer.decode(ids, *skip), decode(&reference, ids, *skip), "{} {:?} {}", name, ids, skip
                );
            }
        }
    }

    #[test]
    fn text_goes_on_where_the_prompt_ends(
        cases in proptest::collection::vec((ids(), ids(), ids(), any::<bool>()), 20)
    ) {
        for (name, decoder) in decoders() {
            let reference = reference(decoder);
            let tokenizer = tokenizer(&reference);
            for (before, prompt, output, skip) in &cases {
                let prompt = [before.as_slice(), prompt].concat();
                let last = visible(&reference, &prompt, *skip).pop();
                if is_byte(&reference, last) && name != "byte level" {
                    // What becomes of the prompt's last bytes depends on the output; their text was shown already.
                    continue;
                }
                let mut detokenizer = Detokenizer::after(tokenizer.pieces(), &prompt, *skip);
                let text = text_of(&mut detokenizer, &tokenizer, output);
                let all = decode(&reference, &[prompt.as_slice(), output].concat(), *skip);
                prop_assert!(all.ends_with(&text), "{name} {prompt:?} {output:?} {skip}: {text:?} in {all:?}");
                let shown = &all[..all.len() - text.len()];
                let of_prompt = decode(&reference, &prompt, *skip);
                let rest = of_prompt.strip_prefix(shown);
                prop_assert!(
                    rest.is_some_and(|rest| rest.is_empty() || rest == "\u{fffd}"),
                    "{name} {prompt:?} {output:?} {skip}: {shown:?} against {of_prompt:?}"
                );
            }
        }
    }
}

#[test]
fn characters_are_shown_as_soon_as_they_are_whole() {
    let (_, decoder) = decoders().swap_remove(0);
    let tokenizer = tokenizer(&reference(decoder));
    let mut detokenizer = Detokenizer::new(tokenizer.pieces(), true);
    let mut shown = Vec::new();
    for byte in "é😀a".bytes() {
        let mut text = String::new();
        detokenizer.push(tokenizer.pieces(), u32::from(byte), &mut text);
        shown.push(text);
    }
    assert_eq!(shown, ["", "é", "", "", "", "😀", "a"]);
}

#[test]
fn a_run_of_byte_tokens_waits_for_its_end_but_not_forever() {
    let (_, decoder) = decoders().swap_remove(1);
    let reference = reference(decoder);
    let tokenizer = tokenizer(&reference);
    let push = |detokenizer: &mut Detokenizer, id: u32| {
        let mut text = String::new();
        detokenizer.push(tokenizer.pieces(), id, &mut text);
        text
    };
    let letter = reference.token_to_id("a").unwrap();
    let mut detokenizer = Detokenizer::after(tokenizer.pieces(), &[letter], true);
    let shown: Vec<String> = "é"
        .bytes()
        .map(u32::from)
        .chain([letter])
        .map(|id| push(&mut detokenizer, id))
        .collect();
    assert_eq!(shown, ["", "", "éa"]);

    let shown: Vec<String> = "😀"
        .repeat(9)
        .bytes()
        .map(|byte| push(&mut detokenizer, u32::from(byte)))
        .collect();
    assert_eq!(shown[31], "😀".repeat(8));
    assert_eq!(shown.concat(), "😀".repeat(8));

    let mut detokenizer = Detokenizer::new(tokenizer.pieces(), true);
    let shown: Vec<String> = [0x41, 0xff, 0x42]
        .map(|byte| push(&mut detokenizer, byte))
        .to_vec();
    assert_eq!(shown, ["", "\u{fffd}\u{fffd}", "\u{fffd}"]);
}

#[test]
fn bytes_of_half_characters_are_told() {
    let all = decoders();
    let level = tokenizer(&reference(all[0].1.clone()));
    assert_eq!(level.token_bytes(0xe4), [0xe4]);
    assert_eq!(level.token_bytes(level.token_to_id("Ġt").unwrap()), b" t");
    let llama = tokenizer(&reference(all[1].1.clone()));
    assert_eq!(llama.token_bytes(0xe4), [0xe4]);
    assert_eq!(llama.token_bytes(llama.token_to_id("▁a").unwrap()), b" a");
    assert_eq!(llama.token_bytes(llama.token_to_id("<s>").unwrap()), b"<s>");
    assert_eq!(llama.token_bytes(u32::MAX), b"");
    let word = tokenizer(&reference(all[8].1.clone()));
    assert_eq!(word.token_bytes(word.token_to_id("##ing").unwrap()), b"ing");
}

#[test]
fn special_ids_and_size_are_told() {
    let reference = reference(None);
    let tokenizer = tokenizer(&reference);
    let specials: Vec<u32> = SPECIALS
        .iter()
        .map(|token| reference.token_to_id(token).unwrap())
        .collect();
    assert_eq!(tokenizer.special_token_ids(), specials);
    assert_eq!(tokenizer.vocab_size(), reference.get_vocab_size(true));
    assert_eq!(tokenizer.id_to_token(specials[0]).as_deref(), Some("<s>"));
    assert_eq!(tokenizer.id_to_token(u32::MAX), None);
    let ids = tokenizer.encode("<s>a</s>", false).unwrap();
    assert_eq!(
        ids,
        [
            specials[0],
            reference.token_to_id("a").unwrap(),
            specials[1]
        ]
    );
    let batch = tokenizer
        .encode_batch(vec!["a".to_owned(), "<s>".to_owned()], false)
        .unwrap();
    assert_eq!(batch, [vec![ids[1]], vec![ids[0]]]);
}

#[test]
fn decoders_that_need_the_whole_text_are_refused_by_name() {
    let refused = |decoder: Option<DecoderWrapper>| {
        let json = reference(decoder).to_string(false).unwrap();
        Tokenizer::from_json(json.as_bytes())
            .unwrap_err()
            .to_string()
    };
    assert!(refused(Some(CTC::default().into())).contains("CTC"));
    assert!(
        refused(Some(sequence(vec![Fuse::new().into(), blanks()]))).contains("Replace after Fuse")
    );
    assert!(refused(Some(Strip::new(' ', 0, 1).into())).contains("Strip at the end"));
    let broken = Tokenizer::from_json(b"{\"version\"")
        .unwrap_err()
        .to_string();
    assert!(broken.starts_with("not a tokenizer.json"), "{broken}");
}
