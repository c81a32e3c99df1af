package faults

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

//go:embed clockshim/clockshim.c
var shimSource string

var shimFlags = []string{
	"-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-nostdlib", "-fvisibility=hidden",
	"-fno-stack-protector", "-U_FORTIFY_SOURCE",
}

func buildShim(ctx context.Context) ([]byte, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	cached, err := shimCache()
	if err == nil {
		if shim, err := os.ReadFile(cached); err == nil {
			return shim, nil
		}
	}
	shim, err := compileShim(ctx)
	if err != nil {
		return nil, err
	}
	if cached != "" {
		_ = publish(cached, shim) // without a cache, the next caller only needs a second more
	}
	return shim, nil
}

// shimCache returns the cached shim's path, which holds a hash of source and flags.
func shimCache() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(shimSource + "\x00" + strings.Join(shimFlags, " ")))
	return filepath.Join(dir, "fencelab", fmt.Sprintf("clockshim-%s-%x.so", runtime.GOARCH, sum[:8])), nil
}

// publish creates the file atomically: other processes may do the same.
func publish(path string, data []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "new-")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

func compileShim(ctx context.Context) ([]byte, error) {
	cc, err := findCompiler()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "fencelab-clockshim-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	out := filepath.Join(dir, "clockshim.so")
	cmd := exec.CommandContext(ctx, cc, slices.Concat(shimFlags, []string{"-x", "c", "-o", out, "-"})...)
	cmd.Stdin = strings.NewReader(shimSource)
	if msg, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("compile the clock's shim with %s: %w: %s\n%s",
			cc, err, strings.TrimSpace(string(msg)), installCompiler)
	}
	return os.ReadFile(out)
}

const installCompiler = "a C compiler and the C library's headers are needed: sudo apt-get install gcc libc6-dev " +
	"(Debian, Ubuntu), sudo dnf install gcc (Fedora) or sudo apk add gcc musl-dev (Alpine), or set CC to the path of one"

func findCompiler() (string, error) {
	names := []string{"cc", "gcc", "clang"}
	if cc := os.Getenv("CC"); cc != "" {
		names = []string{cc}
	}
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("there is no %s: %s", strings.Join(names, ", "), installCompiler)
}
