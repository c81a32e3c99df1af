package faults

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
)

//go:embed clockshim/clockshim.c
var shimSource string

var shimFlags = []string{
	"-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-nostdlib", "-fvisibility=hidden",
	"-fno-stack-protector", "-U_FORTIFY_SOURCE",
}

// buildShim compiles the shim into the file out, in a tenth of a second.
func buildShim(ctx context.Context, out string) error {
	cc, err := findCompiler()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, cc, slices.Concat(shimFlags, []string{"-x", "c", "-o", out, "-"})...)
	cmd.Stdin = strings.NewReader(shimSource)
	if msg, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("compile the clock's shim with %s: %w: %s\n%s",
			cc, err, strings.TrimSpace(string(msg)), installCompiler)
	}
	return os.Chmod(out, 0o644) // as in createPage
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
