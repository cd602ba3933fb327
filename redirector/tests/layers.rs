//! Who may import whom: a module of the library uses only layers below its own. And where `unsafe` may be.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The layers, lowest first, as in the library's documentation. Neighbours on one line don't use each other.
const LAYERS: &[&[&str]] = &[
    &["mesh"],
    &["sys", "telemetry", "serve", "control_plane"],
    &["redirect", "identity", "discovery"],
    &["proxy"],
    &["pods"],
    &["admin", "cni", "debug"],
    &["config"],
    &["app", "uninstall", "doctor"],
    &["cli"],
];

/// Files, and directories with all that is in them, that may hold `unsafe`.
const UNSAFE: &[&str] = &["sys", "redirect/maps.rs"];

#[test]
fn modules_use_only_layers_below_their_own() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        if let Some(module) = module_path(&path) {
            wrong.extend(
                forbidden(&module, &text)
                    .into_iter()
                    .map(|edge| format!("{path}: {edge}")),
            );
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn every_module_has_a_layer() {
    let modules: BTreeSet<String> = sources()
        .iter()
        .filter_map(|(path, _)| module_path(path))
        .map(|module| module[0].clone())
        .collect();
    assert!(
        modules.contains("mesh"),
        "the sources are not where they were expected: {modules:?}"
    );
    let without: Vec<_> = modules.iter().filter(|module| layer(module).is_none()).collect();
    assert!(without.is_empty(), "not in LAYERS: {without:?}");
}

#[test]
fn the_documentation_has_the_same_layers() {
    let library = fs::read_to_string(source_dir().join("lib.rs")).unwrap();
    let documented: Vec<Vec<&str>> = library
        .lines()
        .skip_while(|line| *line != "//! ```text")
        .skip(1)
        .take_while(|line| *line != "//! ```")
        .map(|line| line.trim_start_matches("//!").split('|').map(str::trim).collect())
        .collect();
    assert_eq!(documented, LAYERS);
}

#[test]
fn unsafe_is_only_where_it_may_be() {
    let may = |path: &str| UNSAFE.iter().any(|allowed| Path::new(path).starts_with(allowed));
    let wrong: Vec<_> = sources()
        .into_iter()
        .filter(|(path, text)| has_unsafe(text) && !may(path))
        .map(|(path, _)| path)
        .collect();
    assert!(wrong.is_empty(), "unsafe in {wrong:?}");
}

/// The check itself is checked: a text that stands in a module, and the edges that must be found in it.
#[test]
fn forbidden_edges_are_found() {
    for (module, text, expected) in [
        (
            "mesh",
            "use crate::{proxy::dial, mesh::route};",
            &["mesh -> proxy"][..],
        ),
        (
            "mesh",
            "use crate::{sys, identity::{self, tls}};",
            &["mesh -> identity", "mesh -> sys"],
        ),
        (
            "mesh/route",
            "fn f() { crate::pods::start(); }",
            &["mesh -> pods"],
        ),
        ("mesh/route", "use super::super::proxy;", &["mesh -> proxy"]),
        (
            "mesh/route",
            "use super::{index, super::proxy::{dial}};",
            &["mesh -> proxy"],
        ),
        ("mesh/route", "use super::proxy;", &[]),
        ("mesh", "use super::proxy::dial;", &["mesh -> proxy"]),
        (
            "mesh",
            "mod tests { use super::*; fn f() {} } use super::proxy;",
            &["mesh -> proxy"],
        ),
        ("mesh", "mod tests { use super::super::sys; }", &["mesh -> sys"]),
        ("mesh", "pub(in crate::proxy) fn f() {}", &["mesh -> proxy"]),
        ("mesh", "use crate::sys as mesh;", &["mesh -> sys"]),
        (
            "redirect",
            "use crate::identity::Svid;",
            &["redirect -> identity"],
        ),
        (
            "identity",
            "use crate::unheard_of::X;",
            &["identity -> unheard_of, which has no layer"],
        ),
        (
            "identity",
            "use crate::*;",
            &["identity -> *, which has no layer"],
        ),
        (
            "proxy",
            "use crate :: { mesh :: { index , route , } , redirect , } ;",
            &[],
        ),
        ("proxy", "use crate::proxy::dial; pub(crate) mod x;", &[]),
        (
            "proxy",
            "// use crate::pods;\n/* crate::app /* crate::pods */ crate::app */",
            &[],
        ),
        (
            "proxy",
            "/// See [`crate::pods`].\nfn f() { g(\"crate::pods \\\" crate::app\"); }",
            &[],
        ),
        (
            "proxy",
            "fn f<'a>(x: &'a str) { r#\"crate::pods \"# ; '\"'; crate::app::run() }",
            &["proxy -> app"],
        ),
        (
            "proxy",
            "fn f() { b'\\''; '{'; crate::app::x::<'_>() }",
            &["proxy -> app"],
        ),
    ] {
        let module: Vec<String> = module.split('/').map(str::to_owned).collect();
        assert_eq!(Vec::from_iter(forbidden(&module, text)), expected, "{text}");
    }
}

#[test]
fn unsafe_is_found_where_it_is_code() {
    assert!(has_unsafe("fn f() { g(unsafe{ h() }) }"));
    assert!(!has_unsafe(
        "// unsafe\n/* unsafe */ #![deny(unsafe_code)] const A: &str = r\"unsafe\";"
    ));
}

fn source_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// All sources, by their paths below `src`.
fn sources() -> Vec<(String, String)> {
    let root = source_dir();
    let mut found = Vec::new();
    let mut dirs = vec![root.clone()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let below = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                found.push((below, fs::read_to_string(path).unwrap()));
            }
        }
    }
    found
}

/// The module that a file is; none for the crate roots, which stand above all layers.
fn module_path(file: &str) -> Option<Vec<String>> {
    if ["lib.rs", "main.rs"].contains(&file) || file.starts_with("bin/") {
        return None;
    }
    let names = file.trim_end_matches(".rs").trim_end_matches("/mod").split('/');
    Some(names.map(str::to_owned).collect())
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|line| line.contains(&module))
}

/// The edges from a module that are not downward.
fn forbidden(module: &[String], text: &str) -> BTreeSet<String> {
    let own = &module[0];
    let edge = |to: String| match (layer(own), layer(&to)) {
        _ if to == *own => None,
        (_, None) => Some(format!("{own} -> {to}, which has no layer")),
        (Some(mine), Some(its)) if its < mine => None,
        _ => Some(format!("{own} -> {to}")),
    };
    used(module, &tokens(text)).into_iter().filter_map(edge).collect()
}

fn has_unsafe(text: &str) -> bool {
    tokens(text).iter().any(|token| token == "unsafe")
}

/// The top-level modules that the text of a module names by `crate::` and `super::`.
fn used(module: &[String], tokens: &[String]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    // The modules we are in, each with the depth of braces at which it ends.
    let mut within: Vec<(String, usize)> = module.iter().map(|name| (name.clone(), 0)).collect();
    let mut depth = 0;
    let mut rest = tokens;
    while let [first, after @ ..] = rest {
        rest = after;
        match (first.as_str(), after) {
            ("mod", [name, brace, ..]) if brace == "{" => within.push((name.clone(), depth + 1)),
            ("{", _) => depth += 1,
            ("}", _) => {
                within.retain(|(_, end)| *end < depth);
                depth -= 1;
            }
            ("crate" | "super", [separator, ..]) if separator == "::" => {
                let mut paths = Vec::new();
                rest = path(std::slice::from_ref(first), &after[1..], &mut paths);
                for path in paths {
                    let mut at: Vec<&str> = within.iter().map(|(name, _)| name.as_str()).collect();
                    for name in &path {
                        match name.as_str() {
                            "crate" => at.clear(),
                            "super" => drop(at.pop()),
                            "self" => {}
                            name => at.push(name),
                        }
                    }
                    found.extend(at.first().map(ToString::to_string));
                }
            }
            _ => {}
        }
    }
    found
}

/// Collects the path that begins with `start` and goes on in `tokens`: several, when it has braces. Returns what follows it.
fn path<'a>(start: &[String], mut tokens: &'a [String], found: &mut Vec<Vec<String>>) -> &'a [String] {
    let mut path_so_far = start.to_vec();
    loop {
        match tokens {
            [brace, members @ ..] if brace == "{" => {
                tokens = members;
                while let [first, after @ ..] = tokens {
                    match first.as_str() {
                        "}" => return after,
                        "," => tokens = after,
                        "as" => tokens = &after[1..],
                        _ => tokens = path(&path_so_far, tokens, found),
                    }
                }
                return tokens;
            }
            [name, separator, after @ ..] if separator == "::" => {
                path_so_far.push(name.clone());
                tokens = after;
            }
            [name, after @ ..] => {
                path_so_far.push(name.clone());
                found.push(path_so_far);
                return after;
            }
            [] => return tokens,
        }
    }
}

/// The words and signs of a text: comments and literals are left out, `::` is one sign.
fn tokens(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let is_word = |c: &char| c.is_alphanumeric() || *c == '_';
    let mut tokens = Vec::new();
    let mut rest = chars.as_slice();
    while let [first, ..] = rest {
        let length = match rest {
            ['/', '/', ..] => rest.iter().position(|c| *c == '\n').unwrap_or(rest.len()),
            ['/', '*', ..] => block_comment(rest),
            ['"', ..] => quoted(rest),
            // A character; other quotes are lifetimes.
            ['\'', '\\', ..] | ['\'', _, '\'', ..] => quoted(rest),
            ['r', '"' | '#', ..] if raw_string(rest).is_some() => raw_string(rest).unwrap(),
            [':', ':', ..] => 2,
            // A literal's prefix, with an `r` left to the next round.
            ['b' | 'c', '"' | '\'', ..] | ['b' | 'c', 'r', '"' | '#', ..] => 1,
            _ if is_word(first) => rest.iter().position(|c| !is_word(c)).unwrap_or(rest.len()),
            _ => 1,
        };
        let (token, after) = rest.split_at(length);
        if matches!(token, [':', ':']) || is_word(first) && token.iter().all(is_word) || length == 1 {
            tokens.extend(Some(token.iter().collect::<String>()).filter(|token| !token.trim().is_empty()));
        }
        rest = after;
    }
    tokens
}

/// Length of a block comment; they nest.
fn block_comment(text: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        match text[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// Length of a literal with escapes.
fn quoted(text: &[char]) -> usize {
    let mut at = 1;
    while at < text.len() && text[at] != text[0] {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

/// Length of a raw string; `None` for a raw identifier.
fn raw_string(text: &[char]) -> Option<usize> {
    let hashes = text[1..].iter().take_while(|c| **c == '#').count();
    let open = 1 + hashes;
    if text.get(open) != Some(&'"') {
        return None;
    }
    let close: Vec<char> = std::iter::once('"')
        .chain(std::iter::repeat_n('#', hashes))
        .collect();
    let length = text[open + 1..]
        .windows(close.len())
        .position(|window| *window == close[..]);
    Some(length.map_or(text.len(), |length| open + 1 + length + close.len()))
}
