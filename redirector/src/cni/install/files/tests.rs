//! Files on a real disk.

use super::*;

fn attributes(mode: u32) -> Attributes {
    Attributes { mode, owner: None }
}

#[test]
fn a_file_is_written_anew_with_its_mode() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.conflist");
    for (text, mode) in [("one", 0o640), ("two", 0o600), ("three", 0o755)] {
        replace(&System, &path, text.as_bytes(), attributes(mode)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, mode);
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn only_our_own_unfinished_files_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let names = [
        ".a.conflist.tmp",
        ".redirector",
        "a.redirector-tmp-1-0",
        "b.conf.redirector-saved",
    ];
    for name in names.iter().chain(&[".a.conflist.redirector-tmp-17-3"]) {
        fs::write(directory.path().join(name), "").unwrap();
    }
    remove_unfinished(&System, directory.path()).unwrap();
    let left = fs::read_dir(directory.path()).unwrap();
    let mut left: Vec<_> = left
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, names);
}

#[test]
fn what_is_no_configuration_is_not_listed() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("10-a.conflist"), "text").unwrap();
    fs::write(at("20-b.conf"), [0xff, 0xfe]).unwrap();
    fs::write(at("30-c.conf"), vec![b' '; CONFIGURATION_BYTES as usize + 1]).unwrap();
    fs::write(at("40-d.conf.redirector-saved"), "saved").unwrap();
    fs::write(at("50-e.conf.cilium_bak"), "").unwrap();
    fs::write(at("calico-kubeconfig"), "").unwrap();
    fs::create_dir(at("directory.conf")).unwrap();
    std::os::unix::fs::symlink("nowhere", at("60-f.conf")).unwrap();
    // Nobody may wait for who writes to it.
    nix::unistd::mkfifo(&at("70-g.conf"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let listing = list(directory.path()).unwrap();
    let text = |name: &str| listing.files[name].text.clone();
    assert_eq!(
        listing.files.keys().collect::<Vec<_>>(),
        ["10-a.conflist", "20-b.conf", "30-c.conf"]
    );
    assert_eq!(text("10-a.conflist"), Ok("text".to_owned()));
    assert_eq!(text("20-b.conf"), Err("is not text".to_owned()));
    assert_eq!(text("30-c.conf"), Err("is longer than 1 MiB".to_owned()));
    assert_eq!(listing.saved.keys().collect::<Vec<_>>(), ["40-d.conf"]);
    assert!(listing.cilium_is_exclusive());
}

#[test]
fn errors_say_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let error = list(&directory.path().join("missing")).unwrap_err().to_string();
    assert!(error.contains("--cni-conf-dir"), "{error}");
    for (code, expected) in [
        (
            libc::EROFS,
            "mount the node's directory so that it can be written",
        ),
        (libc::EACCES, "SELinux"),
        (libc::EPERM, "as root"),
        (libc::ENOSPC, "the disk is full"),
    ] {
        let error = failed("write", Path::new("/x"))(io::Error::from_raw_os_error(code)).to_string();
        assert!(
            error.starts_with("cannot write /x (") && error.contains(expected),
            "{error}"
        );
    }
}
