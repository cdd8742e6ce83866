//! Files that are either the old one or the new one, never a part.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::CheckpointError;

/// Writes a file whole: into a temporary file beside it, flushed to the disk, then renamed over
/// it. A failure, or the end of the process, at any moment leaves the former file as it was.
///
/// # Errors
/// [`CheckpointError::Write`] names the file.
pub(super) fn write_atomic(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), CheckpointError> {
    replace(path, fill).map_err(|source| CheckpointError::Write {
        path: path.display().to_string(),
        source,
    })
}

/// Writes bytes as [`write_atomic`] does, for callers with an error of their own.
///
/// # Errors
/// What the operating system refuses.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, |out| out.write_all(bytes))
}

fn replace(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".writing-");
    // Temporary files are private by default; a finished one is as readable as any other file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let file = builder.tempfile_in(folder)?;
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    fill(&mut writer)?;
    let file = writer
        .into_inner()
        .map_err(io::IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    // The rename itself is on the disk only once the folder is.
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_former_file_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("f");
        write_atomic(&path, |w| w.write_all(b"first")).expect("writes");
        let failed = write_atomic(&path, |w| {
            w.write_all(b"second")?;
            Err(io::Error::other("the disk is full"))
        });
        assert!(matches!(failed, Err(CheckpointError::Write { .. })));
        assert_eq!(std::fs::read(&path).expect("reads"), b"first");
        assert_eq!(std::fs::read_dir(folder.path()).expect("lists").count(), 1);
        write_atomic(&path, |w| w.write_all(b"third")).expect("writes");
        assert_eq!(std::fs::read(&path).expect("reads"), b"third");
    }
}
