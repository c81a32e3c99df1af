// Command fencelab runs commands under a lock, checks that services can fence, and shows and sets fences. See cmd/README.md and
// -h.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/stores"
)

const usage = `Usage, each with -h:

  fencelab exec -lock URL -key KEY [flags] -- COMMAND [ARG...]   run a command under a lock
  fencelab probe [flags] URL                                     check that a lock service or store can fence
  fencelab fence show|set [flags] URL KEY [TOKEN]                a store's fence, or a lock's last token

URLs of locks: ` + locks.URLs + `.
URLs of stores: ` + stores.Addresses + `.
`

var helpFlags = []string{"-h", "-help", "--help"}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "exec" {
		catchSignals()
	}
	cli.Main(run)
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	if len(args) == 0 {
		args = []string{""}
	}
	switch {
	case args[0] == "exec":
		return runExec(ctx, args[1:], stdout)
	case args[0] == guardName:
		return runGuard(args[1:])
	case args[0] == "probe":
		return runProbe(ctx, args[1:], stdout)
	case args[0] == "fence":
		return runFence(ctx, args[1:], stdout)
	case slices.Contains(helpFlags, args[0]):
		_, err := io.WriteString(stdout, usage)
		return err
	}
	return misuse(errors.New("fencelab: want exec, probe or fence ('fencelab -h' describes them)"))
}

func misuse(err error) error { return &cli.ExitError{Code: 2, Err: err} }

func parse(c cli.Command, fs *flag.FlagSet, n int, args []string, stdout io.Writer) ([]string, error) {
	switch err := c.Parse(fs, args, stdout); {
	case errors.Is(err, flag.ErrHelp):
		return nil, err
	case err != nil:
		return nil, misuse(err)
	case fs.NArg() != n:
		return nil, misuse(fmt.Errorf("%s: want %s after the flags ('%s -h' lists them)", c.Name, c.Args, c.Name))
	}
	return fs.Args(), nil
}

func bearer(fs *flag.FlagSet) *string {
	return fs.String("token", "", "bearer `token` for the resource, if it is cmd/resource")
}
