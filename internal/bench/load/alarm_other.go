//go:build !linux

package load

var preciseAlarm = timerAlarm
