//! What becomes of directories, without one.

use super::*;

const A: &str = r#"{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"a"}]}"#;
const B: &str = r#"{"cniVersion":"1.0.0","name":"b","plugins":[{"type":"b"},{"type":"c"}]}"#;
const CONF: &str = r#"{"cniVersion":"0.4.0","name":"one","type":"bridge"}"#;
const OTHER_CONF: &str = r#"{"cniVersion":"0.4.0","name":"one","type":"bridge","mtu":9000}"#;

fn entry() -> Entry {
    Entry {
        agent_socket: Some("/run/redirector/cni.sock".into()),
        ..Entry::default()
    }
}

fn found(text: &str) -> Found {
    Found {
        text: Ok(text.to_owned()),
        attributes: Attributes {
            mode: 0o640,
            owner: None,
        },
    }
}

fn listing(files: &[(&str, &str)]) -> Listing {
    let mut listing = Listing::default();
    for (name, text) in files {
        match taken(name) {
            Taken::Saved(before) => listing.saved.insert(before, found(text)),
            _ => listing.files.insert((*name).to_owned(), found(text)),
        };
    }
    listing
}

fn chained() -> Mode {
    Mode::Chained { file: None }
}

fn named(name: &str) -> Mode {
    Mode::Chained {
        file: Some(name.to_owned()),
    }
}

fn owned() -> Mode {
    Mode::Owned {
        copy: "02-redirector.conflist".to_owned(),
        file: None,
    }
}

fn standalone() -> Mode {
    Mode::Standalone {
        file: "YYY-redirector-cni.conf".to_owned(),
    }
}

impl Listing {
    /// What the directory is after a step.
    fn apply(&mut self, step: &Step) {
        match step.clone() {
            Step::Write {
                name,
                text,
                attributes,
            } => {
                let found = Found {
                    text: Ok(text),
                    attributes,
                };
                self.files.insert(name, found);
            }
            Step::Save(name) => {
                let found = self.files.remove(&name).unwrap();
                self.saved.insert(name, found);
            }
            Step::PutBack(name) => {
                let found = self.saved.remove(&name).unwrap();
                self.files.insert(name, found);
            }
            Step::Forget(name) => drop(self.saved.remove(&name).unwrap()),
            Step::Remove(name) => drop(self.files.remove(&name).unwrap()),
        }
    }

    /// Plans and carries out until there is nothing more to do.
    fn installed(&mut self, mode: &Mode) -> Plan {
        for _ in 0..5 {
            let plan = install(self, mode, &entry()).unwrap();
            if plan.steps.is_empty() {
                return plan;
            }
            plan.steps.iter().for_each(|step| self.apply(step));
        }
        panic!("it comes to no end: {self:?}");
    }

    fn removed(&mut self) -> Vec<String> {
        let (steps, left) = remove(self, &|found| *found == entry());
        steps.iter().for_each(|step| self.apply(step));
        assert_eq!(remove(self, &|found| *found == entry()).0, []);
        left
    }

    /// Names of all files, each with how often our plugin's name is in it.
    fn shown(&self) -> Vec<String> {
        let show = |(name, found): (&String, &Found)| {
            let text = found.text.as_deref().unwrap();
            let count = text.matches(r#""redirector-cni""#).count();
            format!("{name} {count}")
        };
        let saved = self
            .saved
            .iter()
            .map(|(name, found)| format!("({})", show((name, found))));
        self.files.iter().map(show).chain(saved).collect()
    }
}

#[test]
fn our_entry_gets_into_the_file_that_the_runtime_uses() {
    for (files, mode, file, expected) in [
        (
            &[("10-a.conflist", A)][..],
            chained(),
            "10-a.conflist",
            &["10-a.conflist 1"][..],
        ),
        (
            &[("10-a.conflist", A), ("05-b.conflist", B)],
            chained(),
            "05-b.conflist",
            &["05-b.conflist 1", "10-a.conflist 0"],
        ),
        // What no runtime can use is passed over.
        (
            &[("00-x.conflist", "{"), ("01-x.conf", A), ("10-a.conflist", A)],
            chained(),
            "10-a.conflist",
            &["00-x.conflist 0", "01-x.conf 0", "10-a.conflist 1"],
        ),
        (
            &[("10-one.conf", CONF)],
            chained(),
            "10-one.conflist",
            &["10-one.conflist 1", "(10-one.conf 0)"],
        ),
        (
            &[("10-one.json", CONF), ("20-b.conflist", B)],
            chained(),
            "10-one.conflist",
            &["10-one.conflist 1", "20-b.conflist 0", "(10-one.json 0)"],
        ),
        (
            &[("05-b.conflist", B), ("10-a.conflist", A)],
            named("10-a.conflist"),
            "10-a.conflist",
            &["05-b.conflist 0", "10-a.conflist 1"],
        ),
        // The other form of the file that is named.
        (
            &[("10-a.conflist", A)],
            named("10-a.conf"),
            "10-a.conflist",
            &["10-a.conflist 1"],
        ),
        (
            &[("10-one.conf", CONF)],
            named("10-one.conflist"),
            "10-one.conflist",
            &["10-one.conflist 1", "(10-one.conf 0)"],
        ),
        (
            &[("10-a.conflist", A)],
            owned(),
            "02-redirector.conflist",
            &["02-redirector.conflist 1", "10-a.conflist 0"],
        ),
        (
            &[("10-one.conf", CONF)],
            owned(),
            "02-redirector.conflist",
            &["02-redirector.conflist 1", "10-one.conf 0"],
        ),
        (
            &[("00-multus.conf", CONF)],
            standalone(),
            "YYY-redirector-cni.conf",
            &["00-multus.conf 0", "YYY-redirector-cni.conf 2"],
        ),
    ] {
        let before = listing(files);
        let mut after = before.clone();
        let plan = after.installed(&mode);
        assert_eq!(
            (plan.file.as_str(), after.shown()),
            (file, expected.iter().map(|text| (*text).to_owned()).collect()),
            "{files:?}"
        );
        assert_eq!(after.removed(), Vec::<String>::new());
        assert_eq!(after, before, "and out again: {files:?}");
    }
}

#[test]
fn there_is_one_network_after_each_step() {
    /// As a runtime chooses: the first that it can use, ours included.
    fn network(listing: &Listing) -> Option<String> {
        let mut usable = listing.files.keys().filter(|name| {
            let text = listing.text(name).unwrap();
            match form(name) {
                Some(Form::List) => List::parse(text).is_ok_and(|list| list.check().is_ok()),
                _ => check_conf(text).is_ok(),
            }
        });
        let text = listing.text(usable.next()?).unwrap();
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        Some(value["name"].as_str().unwrap().to_owned())
    }
    let modes = [chained(), owned(), standalone()];
    for files in [
        &[("10-a.conflist", A)][..],
        &[("10-one.conf", CONF)],
        &[("10-one.json", CONF)],
        &[("10-one.conf", CONF), ("20-b.conflist", B)],
    ] {
        let (first, all) = (network(&listing(files)), &modes);
        // From every way to every other, and out.
        for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (from, to))) {
            let mut now = listing(files);
            for mode in [from, to] {
                while let steps @ [_, ..] = &install(&now, mode, &entry()).unwrap().steps[..] {
                    for step in steps {
                        now.apply(step);
                        assert_eq!(network(&now), first, "{files:?}, {from:?} to {to:?}: {step:?}");
                    }
                }
            }
            for step in remove(&now, &|_| true).0 {
                now.apply(&step);
                assert_eq!(network(&now), first, "{files:?}, out of {to:?}: {step:?}");
            }
            assert_eq!(now, listing(files), "{from:?} to {to:?}");
        }
    }
}

#[test]
fn a_file_that_its_owner_writes_again_is_taken_up_again() {
    for name in ["10-one.conf", "10-one.json"] {
        let mut now = listing(&[(name, CONF)]);
        now.installed(&chained());
        now.files.insert(name.to_owned(), found(OTHER_CONF));
        now.installed(&chained());
        assert_eq!(
            now.shown(),
            ["10-one.conflist 1".to_owned(), format!("({name} 0)")]
        );
        now.removed();
        assert_eq!(now, listing(&[(name, OTHER_CONF)]), "the newer one is put back");
        // The same without an installer in between.
        let mut now = listing(&[(name, CONF)]);
        now.installed(&chained());
        now.files.insert(name.to_owned(), found(OTHER_CONF));
        now.removed();
        assert_eq!(now, listing(&[(name, OTHER_CONF)]));
    }
    // Its owner has come to write a list.
    let mut now = listing(&[("10-one.conf", CONF)]);
    now.installed(&chained());
    now.files.insert("10-one.conflist".to_owned(), found(B));
    now.installed(&chained());
    assert_eq!(now.shown(), ["10-one.conflist 1"]);
    now.removed();
    assert_eq!(now, listing(&[("10-one.conflist", B)]));
}

#[test]
fn a_list_that_somebody_adds_to_stays() {
    let mut now = listing(&[("10-one.conf", CONF)]);
    now.installed(&chained());
    let text = now.text("10-one.conflist").unwrap();
    let more = text.replace(r#""plugins": ["#, r#""plugins": [{"type":"more"},"#);
    now.files.insert("10-one.conflist".to_owned(), found(&more));
    now.removed();
    assert_eq!(now.shown(), ["10-one.conflist 0"]);
    assert!(
        now.text("10-one.conflist")
            .unwrap()
            .contains(r#"{"type":"more"}"#)
    );
    assert_eq!(now.check("10-one.conflist"), Ok(()));
}

#[test]
fn a_lost_list_comes_back_of_the_file_that_gave_way_to_it() {
    let mut now = listing(&[("10-one.conf", CONF)]);
    now.installed(&chained());
    let whole = now.clone();
    now.files.clear();
    now.installed(&chained());
    assert_eq!(now, whole);
    now.files.clear();
    now.removed();
    assert_eq!(now, listing(&[("10-one.conf", CONF)]));
}

#[test]
fn the_copy_follows_its_original_and_outlives_it() {
    let mut now = listing(&[("10-a.conflist", A)]);
    now.installed(&owned());
    now.files.insert("10-a.conflist".to_owned(), found(B));
    now.installed(&owned());
    let copy = now.text("02-redirector.conflist").unwrap().to_owned();
    assert!(
        copy.contains(r#"{"type":"c"}"#) && copy.contains(r#""copyOf":"10-a.conflist""#),
        "{copy}"
    );
    now.files.remove("10-a.conflist");
    let plan = now.installed(&owned());
    assert_eq!(
        (plan.file.as_str(), now.text("02-redirector.conflist")),
        ("02-redirector.conflist", Some(&*copy))
    );
    now.removed();
    assert_eq!(now, listing(&[]));
}

#[test]
fn what_stands_in_the_way_is_named() {
    for (files, mode, expected) in [
        (&[][..], chained(), "there is no CNI configuration yet"),
        (&[("10-a.conflist", "{")], chained(), "10-a.conflist is no list"),
        (
            &[("10-a.conflist", A)],
            named("20-b.conflist"),
            "there is no 20-b.conflist yet",
        ),
        (
            &[("10-a.conflist", "{")],
            named("10-a.conflist"),
            "10-a.conflist is no list",
        ),
        (
            &[("10-a.conf", CONF), ("10-a.conflist", A)],
            chained(),
            "10-a.conf is what the container runtime uses, and 10-a.conflist is there too",
        ),
        (
            &[("10-a.conf", CONF), ("10-a.conf-b.conf", CONF)],
            chained(),
            "10-a.conf-b.conf is there too",
        ),
        (
            &[("01-a.conflist", A)],
            owned(),
            "02-redirector.conflist would come after 01-a.conflist",
        ),
        (
            &[("02-redirector.conflist", A), ("10-a.conflist", A)],
            owned(),
            "02-redirector.conflist is there and is not ours",
        ),
        (
            &[("ZZZ.conflist", A)],
            standalone(),
            "would be the pods' only network",
        ),
        (&[], standalone(), "there is no CNI configuration yet"),
        (
            &[("10-a.conflist", r#"{"name":"n","plugins":[{"type":"a"}]}"#)],
            chained(),
            "has no cniVersion",
        ),
    ] {
        let problem = install(&listing(files), &mode, &entry()).unwrap_err().to_string();
        assert!(problem.contains(expected), "{files:?}: {problem}");
    }
    let plan = install(
        &listing(&[("05-b.conflist", B), ("10-a.conflist", A)]),
        &named("10-a.conf"),
        &entry(),
    );
    assert!(
        plan.unwrap()
            .warning
            .unwrap()
            .contains("05-b.conflist sorts before 10-a.conflist")
    );
}

#[test]
fn entries_of_another_agent_stay_when_ours_goes() {
    let mut now = listing(&[("10-a.conflist", A)]);
    now.installed(&chained());
    let before = now.clone();
    let (steps, left) = remove(&now, &|_| false);
    assert_eq!((steps, left), (vec![], vec!["10-a.conflist".to_owned()]));
    assert_eq!(now, before);
}
