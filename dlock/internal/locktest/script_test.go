package locktest_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/memlock"
)

const child = "LOCKTEST_SCRIPT"

// A failure names the line.
func TestScriptThatFails(t *testing.T) {
	for script, want := range map[string]string{
		"a try k => #1 | a lock\nb try k => held | b lock":                  "PASS",
		"a try k => #1 | a lock\nb try k => #2 | b lock\na release k => ok": `(?s)script\.txt:5 .*got b try k     => held \| b lock\s+want b try k     => #2`,
		"a try k => #1 | a 2*lock":                                          `script\.txt:4 `,
		"a try k => #1 | a lock\na try k ten => #1":                         `script\.txt:5\s`,
		"a try k => #1 | a lock\n# A comment.\na fly k":                     `script\.txt:6\s`,
		"a lose unlock\na try k => #1 | a lock\na heal":                     `(?s)there was no unlock to lose.*script\.txt:6\s`,
		"a try k => #1 | a lock\na lose lock\na try other => #1 | a lock":   `(?s)script\.txt:6 .*a try other => broken wire \| a lock`,
		"a try k 1s => #1 | a lock\nadvance 2s\nb try k => held | b lock":   `(?s)script\.txt:6 .*b try k    => #2 \| b lock`,
	} {
		file := filepath.Join(t.TempDir(), "script.txt")
		require.NoError(t, os.WriteFile(file, []byte("A comment.\n\n-- Name --\n"+script+"\n"), 0o600))
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestChild$", "-test.v")
		cmd.Env = append(os.Environ(), child+"="+file)
		out, err := cmd.CombinedOutput()
		require.Equal(t, want == "PASS", err == nil, "%s", out)
		require.Regexp(t, want, string(out))
	}
}

func TestChild(t *testing.T) {
	file := os.Getenv(child)
	if file == "" {
		t.Skip("not applicable alone: TestScriptThatFails runs it")
	}
	locktest.Scripts(t, file, true, func(*testing.T) locktest.Bench {
		b := memlock.New()
		return locktest.Bench{
			Key:  func(key string) string { return key },
			Open: func(w *locktest.Wire, _ ...string) dlock.Backend { return wired{b.Client(), w} },
		}
	})
}

type wired struct {
	dlock.Backend
	*locktest.Wire
}

func (w wired) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return locktest.Do(ctx, w.Wire, "lock", func(ctx context.Context, _ string) (dlock.Grant, error) { return w.Backend.TryAcquire(ctx, r) })
}
