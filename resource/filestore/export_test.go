package filestore

import (
	"os"
	"path/filepath"
)

func openDir(path string, then func(root *os.Root, dir *os.File) (*Store, error)) (*Store, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	return then(root, dir)
}

func OpenUnlocked(path string) (*Store, error) { return openDir(path, open) }

func OpenUnsyncable(path string) error {
	_, err := openDir(path, func(root *os.Root, dir *os.File) (*Store, error) {
		_ = dir.Close()
		return open(root, dir)
	})
	return err
}

func (s *Store) BeforeRename(do func() error) {
	s.rename = func(from, to string) error {
		if err := do(); err != nil {
			return err
		}
		return s.root.Rename(from, to)
	}
}

// Watch calls f for each sync, with the file's contents, and each rename.
func (s *Store) Watch(f func(what string)) {
	s.sync = func(file *os.File) error {
		b, _ := s.root.ReadFile(filepath.Base(file.Name())) // empty for the directory
		f("sync " + string(b))
		return file.Sync()
	}
	s.rename = func(from, to string) error {
		f("rename")
		return s.root.Rename(from, to)
	}
}

func (s *Store) FailSync(n int, err error) {
	s.sync = func(file *os.File) error {
		if n--; n == 0 {
			return err
		}
		return file.Sync()
	}
}

func (s *Store) File(key string) string { return filepath.Join(s.root.Name(), file(key)) }

var Checksum = checksum
