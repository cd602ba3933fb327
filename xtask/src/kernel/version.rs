//! Debian's order of package versions, and the choice of a kernel by it.

use std::cmp::Ordering;

/// The part of a package's name that tells the flavour: small, without drivers, and the same on every release.
const FLAVOUR: &str = "-cloud-amd64";

/// A package that the archive has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
}

impl Package {
    /// A line of `apt-cache madison`: name, version and source, between bars.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut columns = line.split('|').map(str::trim);
        let (name, version) = (columns.next()?, columns.next()?);
        // Its third column is there for packages, and not in its warnings.
        columns.next()?;
        Some(Self {
            name: name.to_owned(),
            version: version.to_owned(),
        })
    }
}

/// Whether a package is a kernel's image of a series such as `6.1`; the package that only names the newest is none.
pub(crate) fn is_image(name: &str, series: &str) -> bool {
    name.strip_prefix("linux-image-")
        .and_then(|rest| rest.strip_prefix(series))
        .is_some_and(|rest| rest.starts_with('.') && rest.ends_with(FLAVOUR))
}

/// The newest of the packages, or the oldest.
pub(crate) fn choose(packages: Vec<Package>, oldest: bool) -> Option<Package> {
    let order = |a: &Package, b: &Package| compare(&a.version, &b.version);
    if oldest {
        packages.into_iter().min_by(order)
    } else {
        packages.into_iter().max_by(order)
    }
}

/// The first two numbers of a version: what features came with.
pub(crate) fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The order of Debian's policy, chapter 5.6.12: epoch, upstream version, revision.
fn compare(a: &str, b: &str) -> Ordering {
    let split = |text: &str| {
        let (epoch, rest) = text.split_once(':').unwrap_or(("0", text));
        let (upstream, revision) = rest.rsplit_once('-').unwrap_or((rest, "0"));
        (
            epoch.parse::<u32>().unwrap_or(0),
            upstream.to_owned(),
            revision.to_owned(),
        )
    };
    let (a, b) = (split(a), split(b));
    a.0.cmp(&b.0)
        .then_with(|| compare_part(&a.1, &b.1))
        .then_with(|| compare_part(&a.2, &b.2))
}

/// By turns a run of other characters and a number, until they differ.
fn compare_part(mut a: &str, mut b: &str) -> Ordering {
    while !a.is_empty() || !b.is_empty() {
        let (text_a, text_b) = (take(&mut a, false), take(&mut b, false));
        let length = text_a.len().max(text_b.len());
        let weights = |text: &str| -> Vec<i32> {
            let end = std::iter::repeat(0);
            text.chars().map(weight).chain(end).take(length).collect()
        };
        let (number_a, number_b) = (take(&mut a, true), take(&mut b, true));
        let number = |digits: &str| digits.parse::<u64>().unwrap_or(0);
        let order = weights(text_a)
            .cmp(&weights(text_b))
            .then_with(|| number(number_a).cmp(&number(number_b)));
        if order.is_ne() {
            return order;
        }
    }
    Ordering::Equal
}

fn take<'a>(text: &mut &'a str, digits: bool) -> &'a str {
    let end = text.find(|c: char| c.is_ascii_digit() != digits);
    let (taken, rest) = text.split_at(end.unwrap_or(text.len()));
    *text = rest;
    taken
}

/// A tilde is before the end, the end before letters, and letters before the rest.
fn weight(c: char) -> i32 {
    let code = i32::try_from(u32::from(c)).unwrap_or(i32::MAX);
    match c {
        '~' => -1,
        c if c.is_ascii_alphabetic() => code,
        _ => code.saturating_add(256),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_as_debian_does() {
        for (less, more) in [
            ("5.10.218-1", "5.10.223-1"),
            ("5.10.99-1", "5.10.218-1"),
            ("5.10.251-5", "5.10.251-10"),
            ("6.12.115-1", "6.12.115-1+deb13u1"),
            ("6.12.117-1~bpo12+1", "6.12.117-1"),
            ("6.1.0~rc7-1~exp1", "6.1.0-1"),
            ("9.0-1", "1:1.0-1"),
            ("1.0a-1", "1.0+b-1"),
        ] {
            assert_eq!(compare(less, more), Ordering::Less, "{less} {more}");
            assert_eq!(compare(more, less), Ordering::Greater, "{less} {more}");
        }
        assert_eq!(compare("1.00-1", "1.0-1"), Ordering::Equal);
    }

    #[test]
    fn images_are_told_from_what_is_named_like_them() {
        for name in [
            "linux-image-6.1.0-57-cloud-amd64",
            "linux-image-6.1.12+deb14-cloud-amd64",
        ] {
            assert!(is_image(name, "6.1"), "{name}");
        }
        for name in [
            "linux-image-6.1-cloud-amd64",
            "linux-image-cloud-amd64",
            "linux-image-6.12.118+deb13-cloud-amd64",
            "linux-image-6.1.0-57-amd64",
            "linux-image-6.1.0-57-cloud-amd64-dbg",
            "linux-image-6.1.0-57-cloud-amd64-unsigned",
        ] {
            assert!(!is_image(name, "6.1"), "{name}");
        }
    }

    #[test]
    fn the_newest_and_the_oldest_are_chosen() {
        let text = "linux-image-5.10.0-46-cloud-amd64 | 5.10.262-1 | x bullseye/main amd64 Packages\n\
                    linux-image-5.10.0-30-cloud-amd64 |  5.10.218-1 | x bullseye/main amd64 Packages\n\
                    W: something\n";
        let packages: Vec<_> = text.lines().filter_map(Package::parse).collect();
        assert_eq!(packages.len(), 2);
        let chosen = |oldest| choose(packages.clone(), oldest).unwrap().version;
        assert_eq!(
            (chosen(false), chosen(true)),
            ("5.10.262-1".into(), "5.10.218-1".into())
        );
        assert_eq!(choose(Vec::new(), false), None);
        assert_eq!(major_minor("6.12.118-1"), Some((6, 12)));
    }
}
