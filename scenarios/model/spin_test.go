package model

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

func TestSpinAgrees(t *testing.T) {
	spin, err := exec.LookPath("spin")
	if err != nil {
		require.NotEqual(t, "1", os.Getenv("FENCELAB_STRICT"), "no Spin here: sudo apt-get install spin")
		t.Skip("no Spin here: sudo apt-get install spin")
	}
	source, err := os.ReadFile("testdata/lock.pml")
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/lock.pml", source, 0o600))
	var out []byte
	for _, args := range [][]string{{spin, "-a", "lock.pml"}, {"cc", "-w", "-DSAFETY", "-DNOREDUCE", "-o", "pan", "pan.c"}, {dir + "/pan"}} {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Dir = dir
		out, err = cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	c := Config{Fencing: history.FencingOn, Workers: 2, Grants: 3, Writes: 1}
	states, _ := c.Check(^Breach(0), true)
	t.Logf("%d states", states)
	require.Contains(t, string(out), fmt.Sprintf(" %d states, stored", states))
	require.Contains(t, string(out), "errors: 0")
}
