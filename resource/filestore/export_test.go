package filestore

import "os"

// OpenUnlocked is Open without the lock: what a gatekeeper is worth of which there may be two.
func OpenUnlocked(path string) (*Store, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return open(path, dir)
}

// BeforeRename sets what s does between the check and the rename.
func (s *Store) BeforeRename(do func() error) {
	s.rename = func(from, to string) error {
		if err := do(); err != nil {
			return err
		}
		return os.Rename(from, to)
	}
}

// File is the name of key's file.
func (s *Store) File(key string) string { return s.file(key) }
