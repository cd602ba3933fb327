//! Every class of flow, as one table of rows: what it is, what becomes of it with the programs and with Istio's rules, how
//! that is seen, and where the two differ on purpose. Each row runs with each backend and family. docs/redirection.md holds the
//! table, and must be equal to it.
//!
//! `table` says what a row is, `rows` has them, `scene` is where they play, `judge` looks at what an outcome must show.

mod judge;
mod rows;
mod scene;
mod table;

use std::{env, fs, path::PathBuf, process::ExitCode};

use redirector_tests::{
    node::Family,
    suite::{Needs, case, main as suite},
};

use crate::{
    scene::Shared,
    table::{Backend, render},
};

const BEGIN: &str = "<!-- The table is written by the suite `parity`: begin -->\n";
const END: &str = "<!-- end -->\n";
const REGENERATE: &str = "REDIRECTOR_WRITE_DOCS=1 cargo xtask test the_document_holds_the_table";

fn main() -> ExitCode {
    let mut places = Vec::new();
    for backend in Backend::ALL {
        for family in Family::BOTH {
            places.push((backend, family, Shared::default()));
        }
    }
    let mut cases = vec![case("the_document_holds_the_table", the_document_holds_the_table)];
    // Neighbours in this order do not share a node, so that two threads do not wait for each other.
    for row in rows::GROUPS.iter().flat_map(|(_, rows)| *rows) {
        for (backend, family, shared) in &places {
            if !row.families.contains(family) {
                continue;
            }
            let (backend, family, shared) = (*backend, *family, shared.clone());
            let name = format!("{}_{}_{}", row.name, family.name(), backend.name());
            cases.push(case(name, move || {
                shared.with(backend, family, row.outcome(backend), |scene| {
                    judge::judge(row, scene)
                });
            }));
        }
    }
    drop(places);
    suite(Needs::Agent, 2, cases)
}

fn the_document_holds_the_table() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/redirection.md");
    let document = fs::read_to_string(&path).unwrap();
    let (before, rest) = document
        .split_once(BEGIN)
        .expect("the document marks where the table begins");
    let (there, after) = rest
        .split_once(END)
        .expect("the document marks where the table ends");
    let table = render(rows::GROUPS);
    if there == table {
        return;
    }
    if env::var_os("REDIRECTOR_WRITE_DOCS").is_some_and(|value| value == "1") {
        fs::write(&path, [before, BEGIN, &table, END, after].concat()).unwrap();
        return;
    }
    panic!("docs/redirection.md is not what the suite runs; write it anew with: {REGENERATE}");
}
