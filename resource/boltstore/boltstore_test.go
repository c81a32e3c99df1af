package boltstore_test

import (
	"path/filepath"
	"testing"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
	"github.com/fencelab/fencelab/resource/storetest"
)

func TestStore(t *testing.T) {
	var path string
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			path = filepath.Join(t.TempDir(), "resource.db")
			return boltstore.Open(path, nil)
		},
		Reopen: func(s resource.Store) (resource.Store, error) {
			if err := s.Close(); err != nil {
				return nil, err
			}
			return boltstore.Open(path, nil)
		},
	})
}
