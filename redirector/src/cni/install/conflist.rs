//! The text of CNI configurations: whether a container runtime can use one, and the same with our entry or without it.
//!
//! A text is cut and joined, never written anew: what others have put into it stays byte for byte, unknown keys, order and the
//! form of numbers included, and taking our entry out again gives back what was there. Pure functions; which file it is
//! about, and what becomes of it, is `plan`'s matter.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, value::RawValue};

use crate::cni::entry::{Entry, TYPE};

/// How a container runtime reads a file, which goes by its name alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// One plugin.
    Conf,
    /// A list of plugins.
    List,
}

/// The form of the file `name`; none of one that no runtime reads. containerd (go-cni, `loadFromConfDir`) and CRI-O (ocicni,
/// `loadNetworks`) read these three endings in the order of the names' bytes, and use the first.
pub(super) fn form(name: &str) -> Option<Form> {
    match name.rsplit_once('.')?.1 {
        "conflist" => Some(Form::List),
        "conf" | "json" => Some(Form::Conf),
        _ => None,
    }
}

/// Our entry as it stands in a list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Written {
    #[serde(rename = "type")]
    kind: String,
    /// What the plugin reads.
    #[serde(flatten)]
    pub(super) entry: Entry,
    /// The list was made of this file, which is put back when our entry goes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) replaces: Option<String>,
    /// The list is a copy of this file with our entry, and goes with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) copy_of: Option<String>,
}

impl Written {
    pub(super) fn new(entry: &Entry) -> Self {
        Self {
            kind: TYPE.to_owned(),
            entry: entry.clone(),
            replaces: None,
            copy_of: None,
        }
    }

    fn value(&self) -> Value {
        serde_json::to_value(self).expect("texts and lists are JSON")
    }
}

/// Why a text cannot be used; a clause that follows the file's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unusable(String);

impl From<String> for Unusable {
    fn from(why: String) -> Self {
        Self(why)
    }
}

fn unusable<T>(why: impl Into<String>) -> Result<T, Unusable> {
    Err(Unusable(why.into()))
}

/// A list of plugins, with the place of each in its text.
#[derive(Debug)]
pub(super) struct List<'a> {
    text: &'a str,
    name: Option<Value>,
    version: Option<Value>,
    plugins: Vec<Plugin<'a>>,
}

#[derive(Debug)]
struct Plugin<'a> {
    text: &'a str,
    at: Range<usize>,
    kind: String,
}

#[derive(Deserialize)]
struct Keys<'a> {
    name: Option<Value>,
    #[serde(rename = "cniVersion")]
    version: Option<Value>,
    #[serde(borrow)]
    plugins: Option<Vec<&'a RawValue>>,
}

impl<'a> List<'a> {
    /// Reads what libcni reads of a list (`ConfListFromBytes`).
    pub(super) fn parse(text: &'a str) -> Result<Self, Unusable> {
        let keys: Keys<'a> =
            serde_json::from_str(text).map_err(|error| Unusable(format!("is no list: {error}")))?;
        let Some(plugins) = keys.plugins else {
            return unusable("has no plugins");
        };
        let plugins = plugins.into_iter().map(|raw| {
            let raw = raw.get();
            // It borrows from the text, so it lies in it.
            let start = raw.as_ptr() as usize - text.as_ptr() as usize;
            Ok(Plugin {
                text: raw,
                at: start..start + raw.len(),
                kind: plugin_type(&object(raw)?)?,
            })
        });
        let plugins = plugins.collect::<Result<Vec<_>, Unusable>>()?;
        Ok(Self {
            text,
            name: keys.name,
            version: keys.version,
            plugins,
        })
    }

    /// Our entry, the last if there are several.
    pub(super) fn ours(&self) -> Option<Written> {
        let ours = self.plugins.iter().rfind(|plugin| plugin.is_ours())?;
        // Whatever else somebody has written there: the type says whose it is.
        Some(serde_json::from_str(ours.text).unwrap_or_default())
    }

    /// Whether there is no plugin but ours.
    pub(super) fn is_ours_alone(&self) -> bool {
        !self.plugins.is_empty() && self.plugins.iter().all(Plugin::is_ours)
    }

    /// Whether a runtime can use it without us.
    pub(super) fn check(&self) -> Result<(), Unusable> {
        let name = self.name.as_ref().and_then(Value::as_str).unwrap_or_default();
        if name.is_empty() {
            return unusable("has no name");
        }
        if self.plugins.iter().all(Plugin::is_ours) {
            return unusable("has no plugin");
        }
        match &self.version {
            None | Some(Value::String(_)) => Ok(()),
            Some(_) => unusable("has a cniVersion that is no text"),
        }
    }

    /// The text with our entry once, as the last; the same text if it is so already.
    pub(super) fn with(&self, ours: &Written) -> Result<String, Unusable> {
        chains(self.version.as_ref())?;
        let (others, in_place) = match self.plugins.split_last() {
            Some((last, before)) => (
                before,
                last.is_ours() && object(last.text).ok().map(Value::Object) == Some(ours.value()),
            ),
            None => (&[][..], false),
        };
        if in_place && !others.iter().any(Plugin::is_ours) {
            return Ok(self.text.to_owned());
        }
        let (mut text, end) = self.others();
        let Some(last) = self.plugins.iter().rposition(|plugin| !plugin.is_ours()) else {
            return unusable("has no plugin");
        };
        // What stands between two plugins, comma included; the first has only space before it.
        let between = match last {
            0 => format!(",{}", self.before(0)),
            _ => self.before(last).to_owned(),
        };
        text.push_str(&between);
        text.push_str(&ours.text(&between));
        text.push_str(&self.text[end..]);
        Ok(text)
    }

    /// The text without our entry.
    pub(super) fn without(&self) -> String {
        let (mut text, end) = self.others();
        text.push_str(&self.text[end..]);
        text
    }

    /// The text up to the end of the last plugin that is not ours, without ours; and where the rest of it begins.
    fn others(&self) -> (String, usize) {
        let begin = self.plugins.first().map_or(0, |first| first.at.start);
        let mut text = self.text[..begin].to_owned();
        let mut is_first = true;
        for (at, plugin) in self
            .plugins
            .iter()
            .enumerate()
            .filter(|(_, plugin)| !plugin.is_ours())
        {
            if !is_first {
                text.push_str(self.before(at));
            }
            text.push_str(plugin.text);
            is_first = false;
        }
        (text, self.plugins.last().map_or(begin, |last| last.at.end))
    }

    /// What stands before a plugin: the comma and space after the one before it, or the space after the list's bracket.
    fn before(&self, at: usize) -> &'a str {
        let start = self.plugins[at].at.start;
        match at.checked_sub(1) {
            Some(previous) => &self.text[self.plugins[previous].at.end..start],
            None => {
                let head = &self.text[..start];
                &head[head.trim_end_matches([' ', '\t', '\r', '\n']).len()..]
            }
        }
    }

    /// Whether this is what [`of_conf`] makes of a file, apart from our entry.
    pub(super) fn is_made_of(&self, conf: &str) -> bool {
        let Ok(conf) = object(conf) else { return false };
        let others: Vec<_> = self.plugins.iter().filter(|plugin| !plugin.is_ours()).collect();
        matches!(&others[..], [one] if object(one.text).is_ok_and(|one| one == conf))
    }
}

impl Plugin<'_> {
    fn is_ours(&self) -> bool {
        self.kind == TYPE
    }
}

impl Written {
    /// The entry as text that follows `between`: on lines of its own, indented as that is, or on one line.
    fn text(&self, between: &str) -> String {
        match between.rsplit_once('\n') {
            Some((_, indent)) => {
                let text = serde_json::to_string_pretty(self).expect("texts and lists are JSON");
                text.replace('\n', &format!("\n{indent}"))
            }
            None => serde_json::to_string(self).expect("texts and lists are JSON"),
        }
    }
}

/// Whether a runtime can use a file that holds one plugin (libcni, `ConfFromBytes`); and whether that is ours.
pub(super) fn check_conf(text: &str) -> Result<bool, Unusable> {
    let conf = object(text)?;
    let kind = plugin_type(&conf)?;
    if !matches!(key(&conf, "name"), Some(Value::String(name)) if !name.is_empty()) {
        return unusable("has no name");
    }
    Ok(kind == TYPE)
}

/// A list of the one plugin in `conf`, as a runtime makes it (libcni, `ConfListFromConf`), and our entry.
pub(super) fn of_conf(conf: &str, ours: &Written) -> Result<String, Unusable> {
    check_conf(conf)?;
    let keys = object(conf)?;
    let (name, version) = (key(&keys, "name"), key(&keys, "cniVersion"));
    chains(version)?;
    let (name, version) = (name.unwrap_or(&Value::Null), version.unwrap_or(&Value::Null));
    // No text of JSON has a line break in it: only what stands between is indented.
    let plugin = conf.trim().replace('\n', "\n    ");
    let entry = ours.text("\n    ");
    Ok(format!(
        "{{\n  \"cniVersion\": {version},\n  \"name\": {name},\n  \"plugins\": [\n    {plugin},\n    {entry}\n  ]\n}}\n"
    ))
}

/// A file of our plugin alone, for those who run it beside others (Multus): a list, or the one plugin.
pub(super) fn alone(form: Form, entry: &Entry) -> String {
    /// Istio's, of its own file of this kind.
    const VERSION: &str = "0.3.1";
    let ours = Written::new(entry).value();
    let value = match (form, ours) {
        (Form::Conf, Value::Object(mut keys)) => {
            keys.insert("cniVersion".to_owned(), VERSION.into());
            keys.insert("name".to_owned(), TYPE.into());
            Value::Object(keys)
        }
        (_, ours) => serde_json::json!({ "cniVersion": VERSION, "name": TYPE, "plugins": [ours] }),
    };
    format!("{value:#}\n")
}

/// Whether plugins can be chained: prevResult came with 0.3.0, and a second major version would be another protocol.
fn chains(version: Option<&Value>) -> Result<(), Unusable> {
    let text = version.and_then(Value::as_str).unwrap_or_default();
    let mut numbers = text.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(0), Some(3..)) | (Some(1), Some(_)) => Ok(()),
        _ if text.is_empty() => {
            unusable("has no cniVersion, so its plugins cannot be chained: write one from 0.3.0 on there")
        }
        _ => unusable(format!(
            "has cniVersion {text}, by which redirector-cni cannot be chained: it speaks 0.3.0 to 1.x"
        )),
    }
}

fn object(text: &str) -> Result<Map<String, Value>, Unusable> {
    serde_json::from_str(text).map_err(|error| Unusable(format!("is no configuration: {error}")))
}

fn plugin_type(plugin: &Map<String, Value>) -> Result<String, Unusable> {
    match key(plugin, "type") {
        Some(Value::String(kind)) if !kind.is_empty() => Ok(kind.clone()),
        _ => unusable("has a plugin without a type"),
    }
}

/// The value of a key of a plugin, which libcni finds whatever its case.
fn key<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    let same = || object.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
    object.get(name).or_else(|| Some(same()?.1))
}

#[cfg(test)]
mod tests;
