//! Reads GBNF and EBNF: `name ::= alternatives`, literals, classes, groups, `* + ? {m,n}`, `#` comments.
//!
//! Line breaks mean nothing: a rule ends where the next `name ::=` begins. Not here: what becomes of it (`ebnf_lark`).

use std::fmt::Write;

/// Larger repetitions are refused.
const MAX_REPEAT: u32 = 100_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    Literal(String),
    /// A class as a regular expression: `[a-z]`.
    Class(String),
    Name(String),
    Sequence(Vec<Expr>),
    Choice(Vec<Expr>),
    Repeat(Box<Expr>, u32, Option<u32>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub name: String,
    pub body: Expr,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Name(String),
    Defines,
    Literal(String),
    Class(String),
    Repeat(u32, Option<u32>),
    Bar,
    Open,
    Close,
}

/// All rules, in order. The message says in which line something is wrong.
pub fn parse(text: &str) -> Result<Vec<Rule>, String> {
    let tokens = Lexer::new(text).tokens()?;
    let mut parser = Parser { tokens, at: 0 };
    let mut rules = Vec::new();
    while parser.at < parser.tokens.len() {
        rules.push(parser.rule()?);
    }
    Ok(rules)
}

struct Lexer<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Lexer<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            rest: text,
            line: 1,
        }
    }

    fn tokens(mut self) -> Result<Vec<(Token, usize)>, String> {
        let mut tokens = Vec::new();
        while let Some(c) = self.skip_blanks() {
            let line = self.line;
            let token = self
                .token(c)
                .map_err(|message| format!("line {line}: {message}"))?;
            tokens.push((token, line));
        }
        Ok(tokens)
    }

    fn next(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        self.line += usize::from(c == '\n');
        Some(c)
    }

    /// The first character that is neither blank nor part of a comment.
    fn skip_blanks(&mut self) -> Option<char> {
        loop {
            let c = self.rest.chars().next()?;
            if c == '#' {
                while self.rest.chars().next().is_some_and(|c| c != '\n') {
                    self.next();
                }
            } else if c.is_whitespace() {
                self.next();
            } else {
                return Some(c);
            }
        }
    }

    fn token(&mut self, c: char) -> Result<Token, String> {
        if let Some(rest) = self.rest.strip_prefix("::=") {
            self.rest = rest;
            return Ok(Token::Defines);
        }
        if is_name(c) {
            let end = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
            let (name, rest) = self.rest.split_at(end);
            self.rest = rest;
            return Ok(Token::Name(name.to_owned()));
        }
        self.next();
        match c {
            '"' | '\'' => self.literal(c).map(Token::Literal),
            '[' => self.class().map(Token::Class),
            '{' => self.braces(),
            '.' => Ok(Token::Class("(?s:.)".into())),
            '*' => Ok(Token::Repeat(0, None)),
            '+' => Ok(Token::Repeat(1, None)),
            '?' => Ok(Token::Repeat(0, Some(1))),
            '|' => Ok(Token::Bar),
            '(' => Ok(Token::Open),
            ')' => Ok(Token::Close),
            other => Err(format!("unexpected {other:?}")),
        }
    }

    fn literal(&mut self, quote: char) -> Result<String, String> {
        let mut text = String::new();
        loop {
            match self.next().ok_or("a literal is not closed")? {
                c if c == quote => return Ok(text),
                '\\' => text.push(self.escape()?),
                '\n' => return Err("a literal is not closed".into()),
                c => text.push(c),
            }
        }
    }

    /// The character behind a backslash.
    fn escape(&mut self) -> Result<char, String> {
        let c = self.next().ok_or("nothing follows a backslash")?;
        let num_digits = match c {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c => return Ok(c),
        };
        let digits = self.rest.get(..num_digits).unwrap_or_default();
        let code = u32::from_str_radix(digits, 16)
            .ok()
            .and_then(char::from_u32);
        let code = code.ok_or_else(|| format!("\\{c}{digits} is no character"))?;
        self.rest = &self.rest[num_digits..];
        Ok(code)
    }

    fn class(&mut self) -> Result<String, String> {
        let mut class = String::from("[");
        if let Some(rest) = self.rest.strip_prefix('^') {
            self.rest = rest;
            class.push('^');
        }
        let start = class.len();
        loop {
            match self.next().ok_or("a class is not closed")? {
                ']' if class.len() == start => return Err("a class is empty".into()),
                ']' => break,
                '\\' if self.rest.starts_with(['d', 'w', 's', 'D', 'W', 'S']) => {
                    class.push('\\');
                    class.extend(self.next());
                }
                '\\' => push_member(&mut class, self.escape()?),
                '-' => class.push('-'),
                c => push_member(&mut class, c),
            }
        }
        class.push(']');
        Ok(class)
    }

    fn braces(&mut self) -> Result<Token, String> {
        let end = self.rest.find('}').ok_or("a repetition is not closed")?;
        let (inner, rest) = self.rest.split_at(end);
        self.rest = &rest[1..];
        let number = |text: &str| match text.trim().parse::<u32>() {
            Ok(number) if number <= MAX_REPEAT => Ok(number),
            _ => Err(format!(
                "{{{inner}}} is no repetition of up to {MAX_REPEAT} times"
            )),
        };
        let (least, most) = match inner.split_once(',') {
            None => (number(inner)?, Some(number(inner)?)),
            Some((least, most)) if most.trim().is_empty() => (number(least)?, None),
            Some((least, most)) => (number(least)?, Some(number(most)?)),
        };
        if most.is_some_and(|most| most < least) {
            return Err(format!("{{{inner}}} ends before it begins"));
        }
        Ok(Token::Repeat(least, most))
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '-'
}

/// A character as a member of a class.
fn push_member(class: &mut String, c: char) {
    match c {
        '\\' | '[' | ']' | '^' | '-' | '&' | '~' | '/' => {
            class.push('\\');
            class.push(c);
        }
        c if c.is_control() => {
            let _ = write!(class, "\\x{{{:x}}}", u32::from(c));
        }
        c => class.push(c),
    }
}

struct Parser {
    tokens: Vec<(Token, usize)>,
    at: usize,
}

impl Parser {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn line(&self) -> usize {
        let last = self.tokens.len().saturating_sub(1);
        self.tokens
            .get(self.at.min(last))
            .map_or(1, |(_, line)| *line)
    }

    fn starts_rule(&self) -> bool {
        let next = self.tokens.get(self.at + 1).map(|(token, _)| token);
        matches!(self.peek(), Some(Token::Name(_))) && next == Some(&Token::Defines)
    }

    fn rule(&mut self) -> Result<Rule, String> {
        let line = self.line();
        if !self.starts_rule() {
            return Err(format!("line {line}: a rule \"name ::= …\" is expected"));
        }
        let Some((Token::Name(name), _)) = self.tokens.get(self.at).cloned() else {
            return Err(format!("line {line}: a name is expected"));
        };
        self.at += 2;
        let body = self.choice()?;
        if self.at < self.tokens.len() && !self.starts_rule() {
            return Err(format!(
                "line {}: unexpected end of rule {name}",
                self.line()
            ));
        }
        Ok(Rule { name, body })
    }

    fn choice(&mut self) -> Result<Expr, String> {
        let mut options = vec![self.sequence()?];
        while self.peek() == Some(&Token::Bar) {
            self.at += 1;
            options.push(self.sequence()?);
        }
        let first = options.remove(0);
        if options.is_empty() {
            return Ok(first);
        }
        options.insert(0, first);
        Ok(Expr::Choice(options))
    }

    fn sequence(&mut self) -> Result<Expr, String> {
        let mut parts: Vec<Expr> = Vec::new();
        while let Some(token) = self.peek().cloned() {
            if self.starts_rule() || matches!(token, Token::Bar | Token::Close) {
                break;
            }
            let line = self.line();
            self.at += 1;
            let part = match token {
                Token::Name(name) => Expr::Name(name),
                Token::Literal(text) => Expr::Literal(text),
                Token::Class(class) => Expr::Class(class),
                Token::Open => {
                    let inner = self.choice()?;
                    if self.peek() != Some(&Token::Close) {
                        return Err(format!("line {line}: a group is not closed"));
                    }
                    self.at += 1;
                    inner
                }
                Token::Repeat(least, most) => match parts.pop() {
                    Some(part) => Expr::Repeat(Box::new(part), least, most),
                    None => return Err(format!("line {line}: there is nothing to repeat")),
                },
                other => return Err(format!("line {line}: unexpected {other:?}")),
            };
            parts.push(part);
        }
        match parts.len() {
            0 if self.at >= self.tokens.len() || self.starts_rule() => {
                Err(format!("line {}: a rule has no end", self.line()))
            }
            1 => Ok(parts.remove(0)),
            _ => Ok(Expr::Sequence(parts)),
        }
    }
}
