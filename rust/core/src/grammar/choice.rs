//! One of several texts.

use super::GrammarError;
use super::lark::quoted;

/// A Lark grammar of one terminal, so that no text hides another one that starts with it.
pub fn choice_grammar(choices: &[String]) -> Result<String, GrammarError> {
    if choices.is_empty() {
        return Err(GrammarError::at(
            "choice",
            "there is nothing to choose from",
        ));
    }
    if choices.iter().all(String::is_empty) {
        return Err(GrammarError::at("choice", "every choice is empty"));
    }
    let options: Vec<String> = choices.iter().map(|text| quoted(text)).collect();
    Ok(format!("start: CHOICE\nCHOICE: {}\n", options.join(" | ")))
}
