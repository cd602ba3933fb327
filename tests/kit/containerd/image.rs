//! The image of a pod's sandbox, made here: one layer with busybox, which sleeps.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use aws_lc_rs::digest::{SHA256, digest};
use serde_json::json;

use crate::netns::run;

/// Its name, which no registry has.
pub(super) const NAME: &str = "redirector.test/sandbox:1";

/// Makes an archive of it, as `docker save` does.
pub(super) fn make(directory: &Path) -> Result<PathBuf> {
    let at = directory.join("image");
    fs::create_dir_all(at.join("root/bin"))?;
    fs::copy("/bin/busybox", at.join("root/bin/busybox")).context("copying busybox, which must be static")?;
    let tar = |archive: &Path, from: &Path, what: &[&str]| {
        let mut tar = Command::new("tar");
        tar.arg("-cf").arg(archive).arg("-C").arg(from).args(what);
        run(&mut tar)
    };
    tar(&at.join("layer.tar"), &at.join("root"), &["bin"])?;
    let layer = digest(&SHA256, &fs::read(at.join("layer.tar"))?);
    let layer: String = layer.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/bin/busybox", "sleep", "1000000"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer}")]},
    });
    fs::write(at.join("config.json"), config.to_string())?;
    let manifest = json!([{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]);
    fs::write(at.join("manifest.json"), manifest.to_string())?;
    let image = directory.join("image.tar");
    tar(&image, &at, &["manifest.json", "config.json", "layer.tar"])?;
    Ok(image)
}
