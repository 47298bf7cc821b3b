//! GBNF and EBNF as Lark.
//!
//! What does not refer to itself is regular and becomes a terminal; everything else a rule. Parts that stand side by side
//! and are regular share one terminal. Terminals take the longest match, so a grammar whose parts could be cut in
//! several ways may allow less than it says; never more.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use super::ebnf::{Expr, parse};
use super::lark::quoted;

/// GBNF and EBNF write `name ::= …`, Lark `name: …`.
pub fn is_ebnf(text: &str) -> bool {
    text.lines().any(|line| {
        line.split_once("::=").is_some_and(|(name, _)| {
            let name = name.trim();
            !name.is_empty()
                && name
                    .chars()
                    .all(|c| c.is_alphanumeric() || "-_.".contains(c))
        })
    })
}

/// A Lark grammar with the same language; `root` names the first rule.
pub fn ebnf_to_lark(text: &str, root: &str) -> Result<String, String> {
    let rules = parse(text)?;
    let mut bodies = HashMap::new();
    for (index, rule) in rules.iter().enumerate() {
        if bodies
            .insert(rule.name.as_str(), (index, &rule.body))
            .is_some()
        {
            return Err(format!("rule {:?} is defined twice", rule.name));
        }
    }
    if !bodies.contains_key(root) {
        return Err(format!("there is no rule {root:?}"));
    }
    let mut names = Vec::new();
    for rule in &rules {
        collect_names(&rule.body, &mut names);
        if let Some(unknown) = names.iter().find(|name| !bodies.contains_key(**name)) {
            return Err(format!(
                "rule {:?} refers to {unknown:?}, which is not defined",
                rule.name
            ));
        }
    }
    let mut writer = Writer {
        recursive: recursive_rules(&bodies),
        bodies,
        out: String::new(),
        num_extra: 0,
    };
    let start = writer.reference(root);
    let _ = writeln!(writer.out, "start: {start}");
    for rule in &rules {
        let name = writer.reference(&rule.name);
        let body = if writer.recursive.contains(rule.name.as_str()) {
            writer.rule_body(&rule.body)
        } else {
            writer.plain(&rule.body)
        };
        let _ = writeln!(writer.out, "{name}: {body}");
    }
    Ok(writer.out)
}

fn collect_names<'a>(expr: &'a Expr, names: &mut Vec<&'a str>) {
    match expr {
        Expr::Name(name) => names.push(name),
        Expr::Sequence(parts) | Expr::Choice(parts) => {
            for part in parts {
                collect_names(part, names);
            }
        }
        Expr::Repeat(part, ..) => collect_names(part, names),
        Expr::Literal(_) | Expr::Class(_) => {}
    }
}

/// Rules from which a rule that refers to itself can be reached.
fn recursive_rules<'a>(bodies: &HashMap<&'a str, (usize, &'a Expr)>) -> HashSet<&'a str> {
    let edges: HashMap<&str, Vec<&str>> = bodies
        .iter()
        .map(|(name, (_, body))| {
            let mut names = Vec::new();
            collect_names(body, &mut names);
            (*name, names)
        })
        .collect();
    // Rules are taken away as long as everything they refer to has been; those that stay reach a circle.
    let mut left: HashSet<&str> = bodies.keys().copied().collect();
    loop {
        let before = left.len();
        let plain: Vec<&str> = left
            .iter()
            .filter(|name| edges[**name].iter().all(|other| !left.contains(other)))
            .copied()
            .collect();
        for name in plain {
            left.remove(name);
        }
        if left.len() == before {
            return left;
        }
    }
}

struct Writer<'a> {
    bodies: HashMap<&'a str, (usize, &'a Expr)>,
    recursive: HashSet<&'a str>,
    out: String,
    num_extra: usize,
}

impl Writer<'_> {
    /// A rule's name in Lark.
    fn reference(&self, name: &str) -> String {
        let index = self.bodies[name].0;
        if self.recursive.contains(name) {
            format!("r{index}")
        } else {
            format!("T{index}")
        }
    }

    fn is_regular(&self, expr: &Expr) -> bool {
        let mut names = Vec::new();
        collect_names(expr, &mut names);
        !names.iter().any(|name| self.recursive.contains(name))
    }

    /// An expression as it stands; in a terminal, or in a rule whose parts are terminals.
    fn plain(&self, expr: &Expr) -> String {
        match expr {
            Expr::Literal(text) => quoted(text),
            Expr::Class(class) => format!("/{class}/"),
            Expr::Name(name) => self.reference(name),
            Expr::Sequence(parts) if parts.is_empty() => "\"\"".into(),
            Expr::Sequence(parts) => self.joined(parts, " "),
            Expr::Choice(parts) => format!("({})", self.joined(parts, " | ")),
            Expr::Repeat(part, least, most) => repeated(&self.plain(part), *least, *most),
        }
    }

    fn joined(&self, parts: &[Expr], separator: &str) -> String {
        let parts: Vec<String> = parts.iter().map(|part| self.plain(part)).collect();
        parts.join(separator)
    }

    /// An expression in a rule: what is regular goes into terminals.
    fn rule_body(&mut self, expr: &Expr) -> String {
        if self.is_regular(expr) {
            return self.terminal(expr);
        }
        match expr {
            Expr::Sequence(parts) => {
                let runs = parts.chunk_by(|a, b| self.is_regular(a) && self.is_regular(b));
                let runs: Vec<&[Expr]> = runs.collect();
                let written: Vec<String> = runs
                    .into_iter()
                    .map(|run| match run {
                        [part] => self.rule_body(part),
                        run => self.terminal(&Expr::Sequence(run.to_vec())),
                    })
                    .collect();
                written.join(" ")
            }
            Expr::Choice(parts) => {
                let parts: Vec<String> = parts.iter().map(|part| self.rule_body(part)).collect();
                format!("({})", parts.join(" | "))
            }
            Expr::Repeat(part, least, most) => repeated(&self.rule_body(part), *least, *most),
            Expr::Name(_) | Expr::Literal(_) | Expr::Class(_) => self.plain(expr),
        }
    }

    /// A reference to a terminal that is just this.
    fn terminal(&mut self, expr: &Expr) -> String {
        if let Expr::Name(name) = expr {
            return self.reference(name);
        }
        if *expr == Expr::Sequence(Vec::new()) {
            return "\"\"".into();
        }
        let name = format!("X{}", self.num_extra);
        self.num_extra += 1;
        let body = self.plain(expr);
        let _ = writeln!(self.out, "{name}: {body}");
        name
    }
}

fn repeated(part: &str, least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => format!("({part})*"),
        (1, None) => format!("({part})+"),
        (0, Some(1)) => format!("({part})?"),
        (least, None) => format!("({part}){{{least},}}"),
        (least, Some(most)) => format!("({part}){{{least},{most}}}"),
    }
}
