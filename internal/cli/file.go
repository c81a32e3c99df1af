package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// ReadFile reads a file, or standard input if path is "-".
func ReadFile(path string) ([]byte, error) {
	if path == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(path)
}

// Replaceable returns why [ReplaceFile] could not write to path, or nil. It changes nothing.
func Replaceable(path string) error {
	switch info, err := os.Stat(path); {
	case err == nil && info.IsDir():
		return fmt.Errorf("%s is a directory", path)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if writtenInPlace(path) {
		return nil
	}
	f, err := createTemp(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// ReplaceFile writes a file atomically. It writes to what is no regular file, such as /dev/null or a symbolic link.
func ReplaceFile(path string, b []byte) (err error) {
	if writtenInPlace(path) {
		return os.WriteFile(path, b, 0o644)
	}
	f, err := createTemp(path)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(b)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func writtenInPlace(path string) bool {
	info, err := os.Lstat(path) // /dev/stdout may lead to a regular file
	return err == nil && !info.Mode().IsRegular()
}

func createTemp(path string) (*os.File, error) {
	return os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
}
