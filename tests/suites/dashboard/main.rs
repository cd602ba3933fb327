//! The dashboard of the admin port in a browser: a real agent's, and one of a crowded node.

use std::{
    io::{Read as _, Write as _},
    net::Ipv4Addr,
    process::ExitCode,
};

use redirector_tests::{
    agent::Options,
    app::{self, App},
    browser::{Browser, ENTER, TAB},
    mesh::{Mesh, PORT},
    node::{Family, Node},
    suite::{Needs, case, main as suite},
    wait,
};

mod crowd;

/// What is wrong for who reads with a screen reader, uses no mouse, or sees little: a list of problems.
const RULES: &str = include_str!("rules.js");

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        2,
        vec![
            case("an_agent_is_shown_as_it_lives", an_agent_is_shown_as_it_lives),
            case(
                "a_crowded_node_is_shown_in_pages",
                a_crowded_node_is_shown_in_pages,
            ),
        ],
    )
}

/// Waits until a table of the page has a row with all of these words.
fn row(browser: &Browser<'_>, table: &str, words: &[&str]) {
    let mut rows = Vec::new();
    wait::until(&format!("{words:?} in the table of {table}"), || {
        rows = browser.texts(&format!("#{table} tbody tr"));
        let found = rows.iter().any(|row| words.iter().all(|word| row.contains(word)));
        found.then_some(())
    });
}

fn keeps_the_rules(browser: &Browser<'_>) {
    for scheme in ["light", "dark"] {
        browser.prefer(scheme);
        let problems = browser.run(RULES);
        assert_eq!(problems, serde_json::json!([]), "in {scheme} colours");
        picture(browser, scheme);
    }
    browser.prefer("light");
}

/// For the documentation: into the directory that the environment names, if it does.
fn picture(browser: &Browser<'_>, scheme: &str) {
    if let Some(directory) = std::env::var_os("REDIRECTOR_SCREENSHOTS") {
        let title = browser.run("return document.documentElement.dataset.node ?? 'agent';");
        let name = format!("dashboard-{}-{scheme}.png", title.as_str().unwrap());
        let path = std::path::Path::new(&directory).join(name);
        std::fs::write(path, browser.screenshot()).unwrap();
    }
}

fn an_agent_is_shown_as_it_lives() {
    let mut mesh = Mesh::hbone(Options::default());
    let addr = mesh.server.addr(Family::V4, PORT);
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    app::ask(&mesh.client.ns, addr, "hello\n").unwrap();
    let mut open = app::connect(&mesh.client.ns, addr).unwrap();
    open.write_all(b"hello").unwrap();
    open.read_exact(&mut [0; 5]).unwrap();

    let node = &mesh.node;
    let browser = Browser::start(&node.host.ns, node.directory());
    browser.open("http://127.0.0.1:15000/");
    row(&browser, "pods", &[&mesh.client.name, "captured"]);
    row(&browser, "pods", &[&mesh.server.name, "captured"]);
    row(
        &browser,
        "connections",
        &["outbound", &mesh.client.name, "mutual TLS"],
    );
    row(
        &browser,
        "connections",
        &["inbound", &mesh.server.name, "mutual TLS"],
    );
    row(&browser, "flows", &["outbound", "complete"]);
    row(
        &browser,
        "identities",
        &[&mesh.client.identity(), "Available", "in "],
    );
    row(&browser, "packets", &["captured"]);
    assert_eq!(browser.texts("#health"), ["ready"]);
    assert_eq!(browser.texts("#tile-pods"), ["2 of 2"]);
    keeps_the_rules(&browser);

    // What changes is seen.
    drop(open);
    row(&browser, "connections", &["No connection is open"]);
    mesh.agent.release(&mesh.server);
    wait::until("the pod to be gone", || {
        (browser.texts("#tile-pods") == ["1 of 1"]).then_some(())
    });
    assert_eq!(browser.errors(), [""; 0]);
    // And that nothing does, when there is nobody to ask.
    mesh.agent.kill();
    wait::until("the page to say so", || {
        (browser.texts("#health") == ["not answering"]).then_some(())
    });
    keeps_the_rules(&browser);
}

/// Names as nobody should give them, 500 pods and 4,000 connections.
fn a_crowded_node_is_shown_in_pages() {
    let node = Node::new();
    let server = App::start(&node.host.ns, (Ipv4Addr::LOCALHOST, 0).into(), crowd::serve);
    let browser = Browser::start(&node.host.ns, node.directory());
    browser.open(&format!("http://{}/", server.addr));
    row(
        &browser,
        "pods",
        &["shop/checkout-7", "not captured", "no such device"],
    );
    row(&browser, "connections", &["cart.shop.svc"]);
    row(&browser, "identities", &["Unavailable: nobody answers"]);
    row(&browser, "packets", &["egress", "1,000"]);
    let shown = |selector: &str| browser.texts(selector).join("|");
    assert_eq!(shown("#tile-pods"), "499 of 500");
    assert_eq!(shown("#connections .count"), "1–20 of 4,000");
    assert_eq!(shown("#reasons"), "waits for state manager");
    assert!(browser.texts("tbody tr").len() <= 5 * 20);
    keeps_the_rules(&browser);

    // From page to page by keys alone; the focus stays where it is when the tables are drawn anew.
    browser.run("document.querySelector('#pods input').focus()");
    browser.press(&[TAB, ENTER]);
    assert_eq!(shown("#pods .count"), "21–40 of 500");
    let asked = browser.run("return performance.getEntriesByName(new URL('pods', location)).length");
    wait::until("the pods to be asked for again", || {
        let now = browser.run("return performance.getEntriesByName(new URL('pods', location)).length");
        (now.as_u64() > asked.as_u64()).then_some(())
    });
    assert_eq!(browser.run("return document.activeElement.className"), "after");
    browser.press(&[ENTER]);
    assert_eq!(shown("#pods .count"), "41–60 of 500");

    // Names are text.
    browser.run("document.querySelector('#pods input').focus()");
    browser.press(&"onerror".chars().collect::<Vec<_>>());
    row(&browser, "pods", &[crowd::HOSTILE]);
    assert_eq!(shown("#pods .count"), "1–1 of 1");
    assert_eq!(
        browser.run("return [window.broken ?? null, document.images.length]"),
        serde_json::json!([null, 0])
    );
    browser.press(&['x', 'x']);
    row(&browser, "pods", &["Nothing has this in it"]);
    assert_eq!(browser.errors(), [""; 0]);
}
