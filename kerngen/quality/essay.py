"""A text of ours for `kerngen eval`: plain English that no model has been trained on as it stands."""

TEXT = """\
The lighthouse at Varn was built on a rock that the charts of the time did not show. Two ships had found it before the
surveyors did, and the second of them gave the rock its name. The commission that was sent to look at the wreck wrote
a report of nine pages, eight of which were about the cost of a tower and one about the drowned. It recommended a
light with a range of twelve miles, a bell for fog, and a house for two keepers and their families, none of whom had
been asked.

The work took four summers. In the first the masons cut a landing stage out of the rock, forty steps that the sea
covered twice a day. In the second they lost it again, because the winter had rolled a boulder of thirty tons across
it, and they began anew on the other side, where the swell was weaker but the stone was worse. In the third summer the
tower rose by a course of granite every five days, each block numbered on the mainland, where the whole lighthouse had
been set up in a field, dry, to see that it fitted. Children played in it for a year. In the fourth summer came the
lantern, the lenses in straw and sawdust, and a clockwork that turned them once in ninety seconds, driven by a weight
that one of the keepers had to wind up every four hours.

The first keeper was called Ansel Moor. He had been a schoolmaster, and he kept the log of the light as he had kept
the register of his school: who was present, who was late, and why. On the page for the third of March he wrote: "Wind
north, seven. Lamp lit at 5.40. One gull against the glass, dead. Mended the second stair." On the page for the fourth
he wrote the same, with another wind and without the gull. There are thirty-one years of such pages. They were found
in a box under the stair that he had mended so often, and they are now the longest series of wind, temperature and
passing ships that there is for that coast. A statistician who worked with them said that the numbers were worth more
than the light had ever been, and that Moor would have disliked the comparison, since the light was his work and the
numbers were only his habit.

What does a keeper do all night? People asked him that when he came ashore, which was seldom. He said that he
listened. A clockwork that is about to stop sounds different an hour before it does. A lamp that will smoke smells of
it before the glass is dark. Most of what he did was done before it was needed, and so nobody saw that it had been
done. He also said that the second keeper, who slept through every storm, was the better man for the place, because he
could be woken at any moment and was at once as clear as water. Moor himself needed half an hour.

When the light was made electric the clockwork went to a museum, where it still turns, without its weight, by a motor
that is hidden in the base. A card says that it is accurate to two seconds a day. It does not say that the accuracy
was never the point. A ship's officer who sees a flash does not ask whether it comes after ninety seconds or ninety-
one; he asks which light it is, and he knows it by the pattern, two short and one long. If the pattern is wrong he is
on another coast. So the keepers counted. They counted with the clockwork and against it, aloud at first and later
without noticing, and Moor's daughter, who grew up on the rock, is said to have counted in her sleep: one, two, and a
long three.

The last entry in the log is not by Moor. It says: "Light handed over to the automatic at noon. All well. Stair needs
mending." The tower is empty now but for the swallows that found a way in through the gallery door, and once a year a
boat brings a technician, who changes a lamp that has not failed, wipes the salt from a panel, counts the flashes
against his watch because he was told to, and writes the number into a form. Two short, one long. He told me that he
always waits for one more than he needs, to be certain, and that he could not say what he would do if it did not come.

Numbers, in the order in which the commission gave them: height of the tower above high water, 41 metres; courses of
granite, 68; blocks, 2,917; weight of the heaviest, 4.2 tonnes; steps inside, 173, of which the second is the newest;
men who worked on it, 112; men who died of it, 3; cost, 31,480 crowns, which was 11 per cent more than had been
granted; ships lost on the rock since then, none. The report of the commission ends with a sentence that somebody has
underlined in pencil: "It is to be expected that in a few years the expense will be remembered, and its reason
forgotten."
"""
