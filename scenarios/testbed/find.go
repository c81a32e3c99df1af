package testbed

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// MissingError says that this machine has no server of a kind. A test that needs one is skipped for it, see [Need].
type MissingError struct {
	Server string // "ZooKeeper"
	Get    string // the command that provides it, for a shell
	err    error
}

func (e *MissingError) Error() string { return e.err.Error() }
func (e *MissingError) Unwrap() error { return e.err }

// EnvStrict is the environment variable that, set to 1, forbids tests to go without a server, or with an imitation of it.
const EnvStrict = "FENCELAB_STRICT"

// Strict reports whether [EnvStrict] is set.
func Strict() bool { return os.Getenv(EnvStrict) == "1" }

// Need ends a test if err is not nil: it is skipped if the server that it needs is missing on this machine, and fails if err is
// another error, or under [EnvStrict].
func Need(t interface {
	Helper()
	Skipf(format string, args ...any)
	Fatal(args ...any)
}, err error,
) {
	t.Helper()
	missing, ok := errors.AsType[*MissingError](err)
	switch {
	case ok && !Strict():
		t.Skipf("no %s here: %s", missing.Server, missing.Get)
	case err != nil:
		t.Fatal(err)
	}
}

// missing marks err as one for which a test may be skipped.
func (k *kind) missing(err error) error { return &MissingError{k.title, k.get(), err} }

// Real returns an error for [Need] if s is an imitation.
func (s *Server) Real() error {
	return s.kind.beyond(s.Provider, nil)
}

// beyond is err, which says what a server of a provider can't do. What an imitation can't do is missing: a real server can.
func (k *kind) beyond(p Provider, err error) error {
	if p == Embedded {
		return k.missing(cmp.Or(err, errors.New("the "+k.title+" of this test is an imitation")))
	}
	return err
}

// get is the command that provides the server for local use.
func (k *kind) get() string {
	if k.module != "" {
		return "make bin/" + k.programs[0]
	}
	if runtime.GOOS == "darwin" {
		return "brew install " + k.brew
	}
	return "sudo apt-get install " + k.apt
}

// find returns the path of one of the kind's programs on this machine: that which the environment names, one in PATH or in one
// of the kind's directories, or else what make has built.
func (k *kind) find(program string) (string, error) {
	if set := os.Getenv(k.envServer()); set != "" {
		if program != k.programs[0] { // it lies beside the first
			set = filepath.Join(filepath.Dir(set), program)
		}
		path, err := findProgram(set)
		if err != nil {
			err = fmt.Errorf("%s: %w", k.envServer(), err)
		}
		return path, err
	}
	if path, err := findProgram(program); err == nil {
		return path, nil
	}
	for _, dir := range k.dirs {
		all, _ := filepath.Glob(filepath.Join(dir, program)) // in the pattern nothing can be wrong
		if len(all) > 0 {
			return newest(all), nil
		}
	}
	if k.module != "" {
		if path, err := findBuilt(program); err == nil {
			return path, nil
		}
	}
	return "", k.missing(fmt.Errorf("there is no %s: %s, or set %s to its path", program, k.get(), k.envServer()))
}

// newest is the path with the greatest number in it.
func newest(paths []string) string {
	best, most := "", -1
	for _, path := range paths {
		n := 0
		for part := range strings.SplitSeq(path, "/") {
			v, _ := strconv.Atoi(part)
			n = cmp.Or(v, n)
		}
		if n > most {
			best, most = path, n
		}
	}
	return best
}

// findProgram returns the absolute path of a program in PATH, or at a path.
func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}
	return filepath.Abs(path)
}

// findBuilt returns the path of bin/name in the module that the working directory is in.
func findBuilt(name string) (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return findProgram(filepath.Join(dir, "bin", name))
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("there is no go.mod above the working directory")
		}
		dir = parent
	}
}
