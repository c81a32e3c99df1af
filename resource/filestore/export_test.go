package filestore

import (
	"os"
	"path/filepath"
)

// OpenUnlocked is Open without the lock: what a gatekeeper is worth of which there may be two.
func OpenUnlocked(path string) (*Store, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	return open(root, dir)
}

// BeforeRename sets what s does between the check and the rename.
func (s *Store) BeforeRename(do func() error) {
	s.rename = func(from, to string) error {
		if err := do(); err != nil {
			return err
		}
		return s.root.Rename(from, to)
	}
}

// File is the name of key's file.
func (s *Store) File(key string) string { return filepath.Join(s.root.Name(), file(key)) }
