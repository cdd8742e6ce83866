//! The few things a save asks of a file system, so that a test can end it between any two of them.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// A file that is being written.
pub trait DiskFile {
    /// Appends bytes.
    ///
    /// # Errors
    /// What the operating system refuses; a part may have been written.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Returns once everything written is on the disk.
    ///
    /// # Errors
    /// What the operating system refuses.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file system.
pub trait Disk: Send + Sync {
    /// Creates a folder and those above it that are missing.
    ///
    /// # Errors
    /// What the operating system refuses.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Creates a new file.
    ///
    /// # Errors
    /// What the operating system refuses.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;

    /// Returns once the names in a folder are on the disk.
    ///
    /// # Errors
    /// What the operating system refuses.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Gives a folder another name, in one step.
    ///
    /// # Errors
    /// What the operating system refuses.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a folder and what is in it.
    ///
    /// # Errors
    /// What the operating system refuses; a part may have been removed.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The file system of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalDisk;

impl DiskFile for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

impl Disk for LocalDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(path)
    }
}
