//! What is to be done in the CNI's directory of configurations: from what is there to a list of steps. Pure; `files` reads and
//! carries out.
//!
//! Each step alone leaves a directory from which a runtime, which uses the first file it can, gets one network. So what is new
//! comes before what is old goes, and a file that is replaced goes out of the way only when its successor is there.

use std::collections::{BTreeMap, BTreeSet};

use super::conflist::{Form, List, Unusable, Written, alone, check_conf, form, of_conf};
use crate::cni::entry::Entry;

/// What the name of a file ends in that has given way to a list with our entry. No runtime reads it.
const SAVED: &str = ".redirector-saved";

/// What Cilium appends to the names of others' files when it is told to be alone (`cni.exclusive`).
const CILIUM_BACKUP: &str = ".cilium_bak";

/// How the plugin gets into the configuration.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// As the last of the plugins in the file that the runtime uses, or in this one.
    Chained {
        /// Its name.
        file: Option<String>,
    },
    /// In a copy of that file, which sorts before it.
    Owned {
        /// The copy's name.
        copy: String,
        /// The other's name.
        file: Option<String>,
    },
    /// In a file of its own, for those who call it beside other plugins.
    Standalone {
        /// Its name.
        file: String,
    },
}

/// A file of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// What is in it, or why that cannot be told.
    pub(super) text: Result<String, String>,
    pub(super) attributes: Attributes,
}

/// What a file has beside its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) mode: u32,
    /// User and group; none for those of the process that makes it.
    pub(super) owner: Option<(u32, u32)>,
}

impl Attributes {
    /// Of a file that has no predecessor.
    const OURS: Self = Self {
        mode: 0o600,
        owner: None,
    };
}

/// The directory: the files that runtimes read, those that gave way to ours, and the names that Cilium has changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Listing {
    pub(super) files: BTreeMap<String, Found>,
    pub(super) saved: BTreeMap<String, Found>,
    pub(super) cilium_backups: BTreeSet<String>,
}

/// How a name is taken.
pub(super) enum Taken {
    Configuration,
    /// The name it had before.
    Saved(String),
    CiliumBackup,
    Other,
}

pub(super) fn taken(name: &str) -> Taken {
    match (name.strip_suffix(SAVED), form(name)) {
        (Some(before), _) if form(before).is_some() => Taken::Saved(before.to_owned()),
        (_, Some(_)) => Taken::Configuration,
        _ if name.ends_with(CILIUM_BACKUP) => Taken::CiliumBackup,
        _ => Taken::Other,
    }
}

/// One change; each is made at once or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// The file has this text from now on.
    Write {
        name: String,
        text: String,
        attributes: Attributes,
    },
    /// The file is out of the way.
    Save(String),
    /// A file that was out of the way is back.
    PutBack(String),
    /// What was out of the way is no longer wanted.
    Forget(String),
    /// The file goes.
    Remove(String),
}

/// The name under which a file is kept that is out of the way.
pub(super) fn saved_name(name: &str) -> String {
    format!("{name}{SAVED}")
}

/// What makes the directory as it should be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The file that has our entry then.
    pub(super) file: String,
    /// In this order; none if all is well. After them another plan may be due.
    pub(super) steps: Vec<Step>,
    /// What whoever chose the settings should know.
    pub(super) warning: Option<String>,
}

/// Why there is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Problem {
    #[error("there is no CNI configuration yet{}", skipped(.0))]
    Nothing(Vec<(String, String)>),
    #[error("there is no {0} yet, which CNI_CONF_NAME (--cni-conf-name) names")]
    NotThere(String),
    #[error("{0} {1}")]
    Unusable(String, Unusable),
    #[error(
        "{0} is what the container runtime uses, and {1} is there too, so no list can be made of it: remove the one that is not wanted"
    )]
    Twin(String, String),
    #[error(
        "{ours} would come after {first}, and the container runtime uses the first: give a name that sorts before \
         (--cni-owned-config-filename)"
    )]
    SortsAfter { ours: String, first: String },
    #[error(
        "{ours} sorts before every other configuration, and would be the pods' only network: give a name that sorts last (--cni-conf-name)"
    )]
    SortsFirst { ours: String },
    #[error(
        "{0} is there and is not ours: choose another name (--cni-owned-config-filename, or --cni-conf-name where the plugin has its own file)"
    )]
    Foreign(String),
}

fn skipped(files: &[(String, String)]) -> String {
    let each: String = files
        .iter()
        .map(|(name, why)| format!("; {name} {why}"))
        .collect();
    each
}

/// What a file has of us.
enum Ours {
    /// Our entry in somebody else's list.
    Entry(Written),
    /// The list was made by us of this file.
    Replaces(String, Written),
    /// All of it: a copy, or our plugin alone.
    Whole(Written),
}

impl Ours {
    fn written(&self) -> &Written {
        match self {
            Self::Entry(written) | Self::Replaces(_, written) | Self::Whole(written) => written,
        }
    }
}

impl Listing {
    fn text(&self, name: &str) -> Option<&str> {
        self.files.get(name)?.text.as_deref().ok()
    }

    fn ours(&self, name: &str) -> Option<Ours> {
        let text = self.text(name)?;
        if form(name)? == Form::Conf {
            let ours = check_conf(text).ok()?;
            return ours.then(|| Ours::Whole(serde_json::from_str(text).unwrap_or_default()));
        }
        let list = List::parse(text).ok()?;
        let written = list.ours()?;
        Some(match (&written.replaces, &written.copy_of) {
            _ if list.is_ours_alone() => Ours::Whole(written),
            (_, Some(_)) => Ours::Whole(written),
            (Some(replaces), None) => Ours::Replaces(replaces.clone(), written),
            (None, None) => Ours::Entry(written),
        })
    }

    fn is_whole(&self, name: &str) -> bool {
        matches!(self.ours(name), Some(Ours::Whole(_)))
    }

    /// Whether a runtime can use the file.
    fn check(&self, name: &str) -> Result<(), String> {
        let found = self.files.get(name).ok_or("is not there")?;
        let text = found.text.as_deref().map_err(Clone::clone)?;
        let checked = match form(name) {
            Some(Form::List) => List::parse(text).and_then(|list| list.check()),
            _ => check_conf(text).map(|_| ()),
        };
        checked.map_err(|error| error.to_string())
    }

    /// The files of others that a runtime can use, in its order.
    fn usable(&self) -> impl Iterator<Item = &str> {
        let names = self.files.keys().map(String::as_str);
        names.filter(|name| !self.is_whole(name) && self.check(name).is_ok())
    }

    /// The file of others that the runtime uses, or the one that is named, which may have become a list or be one no longer.
    fn primary(&self, named: Option<&str>) -> Result<&str, Problem> {
        let Some(named) = named else {
            let unusable = || {
                let each = self.files.keys().filter(|name| !self.is_whole(name));
                let each = each.filter_map(|name| Some((name.clone(), self.check(name).err()?)));
                Problem::Nothing(each.collect())
            };
            return self.usable().next().ok_or_else(unusable);
        };
        let stem = stem(named);
        let names = [
            named.to_owned(),
            format!("{stem}.conf"),
            format!("{stem}.json"),
            list_name(named),
        ];
        let there = names.iter().find_map(|name| self.files.get_key_value(name));
        let (name, _) = there.ok_or_else(|| Problem::NotThere(named.to_owned()))?;
        self.check(name)
            .map_err(|why| Problem::Unusable(name.clone(), Unusable::from(why)))?;
        Ok(name)
    }

    /// Files out of the way to which no list leads any more: back if nothing is in their place, and forgotten otherwise.
    fn strays(&self) -> Vec<Step> {
        let is_led_to = |name: &str| matches!(self.ours(&list_name(name)), Some(Ours::Replaces(replaces, _)) if replaces == name);
        let stray = self.saved.keys().filter(|name| !is_led_to(name));
        let step = |name: &String| match self.files.contains_key(name)
            || self.files.contains_key(&list_name(name))
        {
            true => Step::Forget(name.clone()),
            false => Step::PutBack(name.clone()),
        };
        stray.map(step).collect()
    }

    /// Takes all that is ours out of a file.
    fn undo(&self, name: &str, ours: &Ours) -> Vec<Step> {
        let whole = || vec![Step::Remove(name.to_owned())];
        let stripped = || {
            let found = &self.files[name];
            let text = found.text.as_deref().unwrap_or_default();
            let text = List::parse(text).map_or_else(|_| text.to_owned(), |list| list.without());
            Step::Write {
                name: name.to_owned(),
                text,
                attributes: found.attributes,
            }
        };
        let replaces = match ours {
            Ours::Whole(_) => return whole(),
            Ours::Entry(_) => return vec![stripped()],
            Ours::Replaces(replaces, _) => replaces,
        };
        let saved = self.saved.get(replaces);
        if self.files.contains_key(replaces) {
            // Its owner has written it anew, so what is out of the way is older.
            let forget = saved.map(|_| Step::Forget(replaces.clone()));
            return forget.into_iter().chain(whole()).collect();
        }
        let made_of = |saved: &Found| {
            let list = self.text(name).and_then(|text| List::parse(text).ok());
            list.zip(saved.text.as_deref().ok())
                .is_some_and(|(list, text)| list.is_made_of(text))
        };
        match saved {
            Some(saved) if made_of(saved) => [Step::PutBack(replaces.clone())]
                .into_iter()
                .chain(whole())
                .collect(),
            // Somebody has put more into the list, or taken the file away that it was made of: the list stays.
            saved => {
                let forget = saved.map(|_| Step::Forget(replaces.clone()));
                [stripped()].into_iter().chain(forget).collect()
            }
        }
    }

    /// Takes all that is ours out of every file but `kept`.
    fn undo_others(&self, kept: &str) -> Vec<Step> {
        let others = self.files.keys().filter(|name| *name != kept);
        let ours = others.filter_map(|name| Some((name, self.ours(name)?)));
        ours.flat_map(|(name, ours)| self.undo(name, &ours)).collect()
    }

    /// A hint for whoever wonders who removes our files.
    pub(super) fn cilium_is_exclusive(&self) -> bool {
        !self.cilium_backups.is_empty()
    }

    /// Writes `text` unless it is there.
    fn write(&self, name: &str, text: String, attributes: Attributes) -> Option<Step> {
        (self.text(name) != Some(&text)).then(|| Step::Write {
            name: name.to_owned(),
            text,
            attributes,
        })
    }
}

/// What brings our entry into the configuration, once, and out of where it no longer belongs.
pub(super) fn install(listing: &Listing, mode: &Mode, entry: &Entry) -> Result<Plan, Problem> {
    let strays = listing.strays();
    let back = strays.iter().any(|step| matches!(step, Step::PutBack(_)));
    let (file, mut steps, warning) = match mode {
        _ if back => return Ok(plan(String::new(), strays, None)),
        Mode::Chained { file } => chained(listing, file.as_deref(), entry)?,
        Mode::Owned { copy, file } => owned(listing, copy, file.as_deref(), entry)?,
        Mode::Standalone { file } => standalone(listing, file, entry)?,
    };
    steps.extend(listing.undo_others(&file));
    steps.extend(strays);
    Ok(plan(file, steps, warning))
}

fn plan(file: String, steps: Vec<Step>, warning: Option<String>) -> Plan {
    Plan { file, steps, warning }
}

type Planned = Result<(String, Vec<Step>, Option<String>), Problem>;

fn chained(listing: &Listing, named: Option<&str>, entry: &Entry) -> Planned {
    let primary = listing.primary(named)?;
    let failed = |name: &str| {
        let name = name.to_owned();
        move |why| Problem::Unusable(name, why)
    };
    let mut ours = Written::new(entry);
    // The file may be a list of ours to whose model its owner has written again.
    let replaced = match listing.ours(primary) {
        Some(Ours::Replaces(replaces, _)) => Some(replaces),
        _ => None,
    };
    let model = match (form(primary), &replaced) {
        (Some(Form::Conf), _) => Some(primary.to_owned()),
        (_, Some(replaces)) if listing.check(replaces).is_ok() => Some(replaces.clone()),
        _ => None,
    };
    let warning = |file: &str| {
        let first = listing
            .usable()
            .find(|name| *name < file && Some(*name) != model.as_deref())?;
        named.map(|_| {
            format!(
                "{first} sorts before {file}, which --cni-conf-name leads to: a container runtime that uses the first file calls no \
                 plugin of ours"
            )
        })
    };
    let Some(model) = &model else {
        let found = &listing.files[primary];
        let list = List::parse(listing.text(primary).unwrap_or_default()).map_err(failed(primary))?;
        ours.replaces = replaced;
        let text = list.with(&ours).map_err(failed(primary))?;
        let write = listing.write(primary, text, found.attributes);
        return Ok((primary.to_owned(), write.into_iter().collect(), warning(primary)));
    };
    let list = list_name(model);
    let is_made_of_it =
        matches!(listing.ours(&list), Some(Ours::Replaces(replaces, _)) if replaces == *model);
    if listing.files.contains_key(&list) && !is_made_of_it {
        return Err(Problem::Twin(model.clone(), list));
    }
    let mut between = listing
        .usable()
        .filter(|name| *name > model.as_str() && *name < list.as_str());
    if let Some(other) = between.next() {
        return Err(Problem::Twin(model.clone(), other.to_owned()));
    }
    ours.replaces = Some(model.clone());
    let text = of_conf(listing.text(model).unwrap_or_default(), &ours).map_err(failed(model))?;
    let write = listing.write(&list, text, listing.files[model].attributes);
    let steps = write.into_iter().chain([Step::Save(model.clone())]).collect();
    let warning = warning(&list);
    Ok((list, steps, warning))
}

fn owned(listing: &Listing, copy: &str, named: Option<&str>, entry: &Entry) -> Planned {
    let is_ours = listing.is_whole(copy);
    if listing.files.contains_key(copy) && !is_ours && listing.check(copy).is_ok() {
        return Err(Problem::Foreign(copy.to_owned()));
    }
    let mut ours = Written::new(entry);
    let primary = match listing.primary(named) {
        Ok(primary) => primary,
        // Its owner may be about to write it again, after a reboot for example. Until then the copy keeps pods in the mesh.
        Err(Problem::Nothing(_) | Problem::NotThere(_)) if is_ours => {
            let failed = |why| Problem::Unusable(copy.to_owned(), why);
            let list = List::parse(listing.text(copy).unwrap_or_default()).map_err(failed)?;
            ours.copy_of = list.ours().and_then(|written| written.copy_of);
            let text = list.with(&ours).map_err(failed)?;
            let write = listing.write(copy, text, listing.files[copy].attributes);
            return Ok((copy.to_owned(), write.into_iter().collect(), None));
        }
        Err(problem) => return Err(problem),
    };
    if let Some(first) = listing.usable().next().filter(|first| *first < copy) {
        return Err(Problem::SortsAfter {
            ours: copy.to_owned(),
            first: first.to_owned(),
        });
    }
    ours.copy_of = Some(primary.to_owned());
    let text = listing.text(primary).unwrap_or_default();
    let made = match form(primary) {
        Some(Form::List) => List::parse(text).and_then(|list| list.with(&ours)),
        _ => of_conf(text, &ours),
    };
    let text = made.map_err(|why| Problem::Unusable(primary.to_owned(), why))?;
    let write = listing.write(copy, text, listing.files[primary].attributes);
    Ok((copy.to_owned(), write.into_iter().collect(), None))
}

fn standalone(listing: &Listing, file: &str, entry: &Entry) -> Planned {
    if listing.files.contains_key(file) && !listing.is_whole(file) && listing.check(file).is_ok() {
        return Err(Problem::Foreign(file.to_owned()));
    }
    if listing.primary(None)? > file {
        return Err(Problem::SortsFirst {
            ours: file.to_owned(),
        });
    }
    let text = alone(form(file).unwrap_or(Form::Conf), entry);
    let write = listing.write(file, text, Attributes::OURS);
    Ok((file.to_owned(), write.into_iter().collect(), None))
}

/// What takes our entry out again, where it is `mine`; and what it leaves of others' entries of ours.
pub(super) fn remove(listing: &Listing, mine: &dyn Fn(&Entry) -> bool) -> (Vec<Step>, Vec<String>) {
    let (mut steps, mut left) = (Vec::new(), Vec::new());
    for name in listing.files.keys() {
        match listing.ours(name) {
            Some(ours) if mine(&ours.written().entry) => steps.extend(listing.undo(name, &ours)),
            Some(_) => left.push(name.clone()),
            None => {}
        }
    }
    steps.extend(listing.strays());
    (steps, left)
}

fn stem(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

fn list_name(name: &str) -> String {
    format!("{}.conflist", stem(name))
}

#[cfg(test)]
mod tests;
