//! The image, built from the Containerfile without a daemon and without base images: what its build stage would make is given instead.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command, time::Duration};

use redirector_tests::{
    netns::{Directory, unique_prefix},
    process,
};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn the_image_is_built_from_the_containerfile() {
    let directory = Directory::create(&unique_prefix()).unwrap();
    let at = |name: &str| directory.path().join(name);
    for made in [
        "made/image/usr/local/bin",
        "made/image/etc",
        "made/image/run",
        "made/image/var",
        "nothing",
    ] {
        fs::create_dir_all(at(made)).unwrap();
    }
    for program in ["redirector", "redirector-cni"] {
        fs::write(at("made/image/usr/local/bin").join(program), program).unwrap();
    }
    symlink("/run", at("made/image/var/run")).unwrap();
    let buildah = |arguments: &[&str]| {
        let mut buildah = Command::new("buildah");
        buildah.args(["--storage-driver", "vfs"]);
        buildah
            .arg("--root")
            .arg(at("storage"))
            .arg("--runroot")
            .arg(at("runroot"));
        let (status, said) = process::output(buildah.args(arguments), DEADLINE);
        assert!(status.success(), "{said}");
        said
    };
    let containerfile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/Containerfile");
    let made = format!("build={}", at("made").display());
    let (containerfile, nothing) = (
        containerfile.display().to_string(),
        at("nothing").display().to_string(),
    );
    let arguments = [
        "build",
        "--isolation",
        "chroot",
        "--build-context",
        &made,
        "--tag",
        "redirector:test",
        "--file",
    ];
    buildah(&[&arguments[..], &[&containerfile, &nothing]].concat());
    let told = buildah(&["inspect", "--type", "image", "redirector:test"]);
    let told: Value = serde_json::from_str(&told[told.find('{').expect("JSON")..]).unwrap();
    let config = &told["OCIv1"]["config"];
    assert_eq!(
        config["Entrypoint"],
        serde_json::json!(["/usr/local/bin/redirector"])
    );
    // Paths of the control plane's files begin at the working directory.
    assert_eq!(config["WorkingDir"], "/");
    buildah(&["rmi", "--all"]);
}
